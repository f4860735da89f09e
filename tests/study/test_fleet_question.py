"""Questions about fleets: how many replicas, which router, what a million tokens costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.config.families import tunings
from servesim.config.layers import apply_assignment, set_key, value_at
from servesim.config.router_command import apart_command, router_command
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request, Shape
from servesim.costs.device_profile import load_profile
from servesim.routers import ROUTERS
from servesim.runs.simulate import simulate
from servesim.study import pilot_runs
from servesim.study import recommend as recommending
from servesim.study.executor import open_executor
from servesim.study.experiment import format_setting
from servesim.study.fleet_question import FleetSearch, name_of, routers_for
from servesim.study.progress import Progress
from servesim.study.ranking import Row
from servesim.study.recommend import Answer, Question, recommend
from servesim.study.recommend_text import answer_json, answer_text
from servesim.study.result import load_result
from servesim.traces.trace import Trace

from ..commands.running import run_sim

LIMIT = "p99_ttft_ms <= 1000"
LENGTHS = {"kind": "fixed", "prompt": 10, "output": 2}
PRICE = 1.8  # per hour


def load(rate: float, requests: int = 600) -> dict[str, Any]:
    return {"requests": requests, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": LENGTHS}


def fleet(rate: float = 20, requests: int = 100, **cluster: Any) -> dict[str, Any]:
    """A replica serves one request at a time, with two steps of 50 ms: ten per second."""
    return {
        "workload": load(rate, requests), "policy": {"name": "vllm-v1", "max_num_seqs": 1}, "profile": {"base": 0.05},
        "engine": {"num_blocks": 100}, "cluster": cluster,
    }  # fmt: skip


@pytest.fixture
def one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only setting is one request at a time."""
    defaults = {"policy.max_num_seqs": 1, "engine.num_blocks": 100}
    single = tunings()["vllm"]._replace(
        grids=[{"policy.max_num_seqs": (1,)}], defaults=lambda about, requests: defaults
    )
    monkeypatch.setattr(recommending, "tunings", lambda: {"vllm": single})
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 600)


def ask(folder: Path, rate: float, constraints: tuple[str, ...] = (LIMIT,), **options: Any) -> Answer:
    keys = {"profile": {"base": 0.05}, "workload": load(rate), "cluster": {"price_per_hour": PRICE}}
    question = Question("vllm", keys, constraints, **options)
    with open_executor("local", 1) as executor, Progress("recommend", quiet=True) as progress:
        return recommend(question, folder, executor, progress)


def test_35_requests_per_second_need_four_replicas_of_ten(one_setting: None, tmp_path: Path) -> None:
    answer = ask(tmp_path, 35)
    found = answer.fleet
    assert found is not None and found.replicas == 4 and found.holds and answer.holds
    assert found.fewer is not None and not found.fewer.eligible  # three were tried
    assert found.best.mean("p99_ttft_ms") <= 1000 < answer.best.mean("p99_ttft_ms")
    cost = 4 * PRICE / 3600 / found.best.mean("output_throughput") * 1e6
    assert found.best.mean("cost_per_million_tokens") == pytest.approx(cost)
    text = answer_text(answer, "start it", "next", router_command({"name": found.router}, 4, "m", "vllm"))
    assert "4 replicas behind round-robin hold 35 req/s. With 3, the best one misses" in text
    assert "Cost per million output tokens" in text and "server replica-4:8000;" in text
    data = answer_json(answer, "start it", "nginx")
    assert data["replicas"] == 4 and set(data["fleets"]) == {"round-robin", "least-requests"} and data["meets"]
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert best["cluster"] == {"price_per_hour": PRICE, "replicas": 4, "router": "round-robin"}
    assert load_result(tmp_path / "fleet-4").rows[0].mean("p99_ttft_ms") == found.best.mean("p99_ttft_ms")


def test_without_limits_the_backlog_decides_and_a_load_that_one_holds_has_no_fleet(
    one_setting: None, tmp_path: Path
) -> None:
    answer = ask(tmp_path / "many", 25, ())
    assert answer.fleet is not None and answer.fleet.replicas == 3
    assert ask(tmp_path / "one", 5, ()).fleet is None


def test_the_user_fixes_the_replicas_and_the_routers(one_setting: None, tmp_path: Path) -> None:
    found = ask(tmp_path / "few", 35, replicas=2, routers=["power-of-two"]).fleet
    assert found is not None and found.replicas == 2 and not found.holds and found.router == "power-of-two"
    alone = ask(tmp_path / "one", 35, replicas=1)
    assert alone.fleet is None and not alone.holds


def test_limits_that_one_replica_meets_at_no_load_have_no_fleet(one_setting: None, tmp_path: Path) -> None:
    assert ask(tmp_path, 35, ("mean_tpot_ms <= 1",)).fleet is None


def test_a_router_that_knows_prefixes_is_compared_if_requests_share_some() -> None:
    shared = fleet() | {"workload": {**load(5), "prefixes": {"count": 2, "tokens": 32}}}
    assert routers_for("vllm", fleet(), ()) == ["round-robin", "least-requests"]
    assert routers_for("vllm", shared, ())[2:] == ["llm-d"]
    assert routers_for("sglang", shared, ())[2:] == ["sglang-cache-aware"]
    assert routers_for("sglang", shared, ["random", "random"]) == ["random"]


def test_apart_the_pools_are_as_large_as_the_share_of_the_time() -> None:
    """A replica computes prompts of 100 tokens in three quarters of the time."""
    throughput = 0.75 / load_profile("h200-llama3.1-8b").cost.seconds(Shape(1, 100, 100, 10_000))
    metrics = {"request_throughput": throughput, "prompt_tokens_computed": 5000.0, "completed": 50.0}
    one, base = Row(0, {}, "", [{"metrics": metrics}]), {"profile": "h200-llama3.1-8b"}
    search = FleetSearch(base, 30, one, None, ["round-robin"], lambda *_: pytest.fail("no run"))
    assert [[pool["replicas"] for pool in pools] for pools in search.splits(8)] == [[5, 3], [6, 2], [7, 1]]
    assert [[pool["role"] for pool in pools] for pools in search.splits(2)] == [["prefill", "decode"]]
    assert name_of(Row(0, {"cluster.pools": search.splits(2)[0]}, "", [])) == "1 prefill + 1 decode"


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--replicas", "0", "--replicas: expected a number from 1 to 1024, got 0"),
        ("--router", "roundrobin", "--router.name: no router 'roundrobin'"),
        ("--price-per-hour", "-1", "cluster.price_per_hour: expected"),
    ],
)
def test_bad_options_are_one_line(
    option: str, value: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ("--model", "llama-3.1-8b", "--device", "H100", "--rate", "5", "--prompt", "20", "--output", "5")
    said = run_sim(capsys, "recommend", *names, option, value, "-o", str(tmp_path / "out"))
    assert said.code == 2 and said.error.count("\n") == 1 and text in said.error


def test_costs_count_replicas_devices_and_seconds() -> None:
    alone = simulate(scenario_from(fleet(replicas=2, price_per_hour=PRICE))).result()
    seconds = 2 * alone["makespan"]
    assert alone["cost_per_million_tokens"] == pytest.approx(seconds * PRICE / 3600 / 200 * 1e6)
    assert alone["cost_per_million_total_tokens"] == pytest.approx(alone["cost_per_million_tokens"] / 6)
    pools = [{"name": "a", "price_per_hour": 3 * PRICE}, {"name": "b"}]
    mixed = simulate(scenario_from(fleet(pools=pools, price_per_hour=PRICE))).result()
    assert mixed["cost_per_million_tokens"] == pytest.approx(2 * alone["cost_per_million_tokens"])
    assert "cost_per_million_tokens" not in simulate(scenario_from(fleet(replicas=2))).result()
    four = {"model": "llama-3.1-70b", "device": "H100", "tensor_parallel": 4}
    wide = simulate(scenario_from({**fleet(0.1, 3, price_per_hour=PRICE), "profile": four, "engine": {}}))
    assert wide.price_per_second == pytest.approx(4 * PRICE / 3600)


@pytest.mark.parametrize("start_up", [1.0, 600.0])
def test_a_replica_costs_from_its_order_to_its_removal(start_up: float) -> None:
    """Two replicas serve three requests of 8 s each, one at a time. At 10 s one waits, at 20 s none.

    So the second pool orders a replica at 10 s, and removes it at 20 s, unless it has not started before the last end.
    """
    requests = [Request(number, 0.0, 4, 8) for number in range(6)] + [Request(6, 59.0, 4, 8)]
    rule = {"min": 1, "max": 2, "interval": 10, "target_queue": 0.5, "start_up": start_up}
    pools = [{"name": "a"}, {"name": "b", "price_per_hour": 3 * PRICE, "autoscale": rule}]
    tree = {"policy": {"name": "vllm", "max_num_seqs": 1}, "profile": {"base": 1.0}, "engine": {"num_blocks": 99}}
    run = simulate(
        scenario_from({**tree, "cluster": {"pools": pools, "price_per_hour": PRICE}}), Trace(requests, "made", "synth")
    )
    makespan = run.result()["makespan"]
    assert run.end == makespan == 67.0  # the last request takes 8 s
    second = 57.0 if start_up > 60 else 10.0
    assert run.fleet["replica_seconds"] == pytest.approx(2 * makespan + second)
    paid = makespan + 3 * (makespan + second)
    assert run.result()["cost_per_million_tokens"] == pytest.approx(paid * PRICE / 3600 / 56 * 1e6)


def sweep(folder: Path, base: dict[str, Any], **keys: Any) -> str:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": base, **keys}))
    return str(path)


def test_a_sweep_over_replicas_and_routers_finds_the_cheapest_fleet_within_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    routers = ["random", {"name": "vllm-dp", "version": "0.25"}]
    file = sweep(
        tmp_path, fleet(25, 600, replicas=2, router="round-robin", price_per_hour=PRICE), subject_to=[LIMIT],
        params={"cluster.replicas": [2, 3, 4], "cluster.router": routers}, objectives=["cost_per_million_tokens"],
    )  # fmt: skip
    said = run_sim(capsys, "sweep", file, "-o", str(tmp_path / "out"), "-j", "1", "-q", "--no-report")
    assert said.code == 0, said.error
    assert "Winner: replicas=3 router=" in said.out and "router={name:vllm-dp,version:0.25}" in said.out


def test_a_cost_without_a_price_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"cluster.replicas": [1, 2]}
    file = sweep(tmp_path, fleet(), params=params, objectives=["cost_per_million_tokens"])
    said = run_sim(capsys, "sweep", file, "-o", str(tmp_path / "out"), "-j", "1", "-q")
    assert said.code == 2 and said.error.count("\n") == 1 and "expected cluster.price_per_hour" in said.error


def test_pools_are_swept_by_name_and_as_a_whole() -> None:
    pools = [{"name": "prefill", "replicas": 1}, {"name": "decode", "replicas": 3}]
    base = {"cluster": {"replicas": 4, "router": {"name": "vllm-dp", "version": "0.25"}}}
    apart = apply_assignment(base, {"cluster.pools": pools, "cluster.pools.prefill.replicas": 2})
    assert value_at(apart, "cluster.pools.prefill.replicas") == 2 and "replicas" not in apart["cluster"]
    assert set_key(apart, "cluster.replicas", 2)["cluster"].keys() == {"router", "replicas"}
    assert format_setting("cluster.pools", apart["cluster"]["pools"]) == "pools=[prefill:2,decode:3]"
    with pytest.raises(BadInput, match="no pool 'draft'; known: prefill, decode"):
        set_key(apart, "cluster.pools.draft.replicas", 1)


def test_another_router_drops_the_fields_of_the_old_one() -> None:
    base = {"cluster": {"router": "round-robin"}}
    changed = apply_assignment(base, {"cluster.router.version": "0.25", "cluster.router.name": "vllm-dp"})
    assert changed["cluster"]["router"] == {"name": "vllm-dp", "version": "0.25"}
    assert set_key(changed, "cluster.router.name", "llm-d")["cluster"]["router"] == {"name": "llm-d"}


def test_the_capacity_of_a_fleet_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three replicas serve 30 requests per second."""
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 1000)
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet(replicas=3, router="least-requests")))
    said = run_sim(capsys, "capacity", str(file), "--subject-to", "mean_ttft_ms <= 400", "--json", "-j", "1", "-q",
                   "-o", str(tmp_path / "out"), "--set", "cluster.replicas=3")  # fmt: skip
    assert said.code == 0, said.error
    capacity = load_result(tmp_path / "out").curves[0].capacity
    assert 25 < capacity.rate < 30 and json.loads(said.out)


def test_every_router_has_a_command_or_a_sentence() -> None:
    texts = {name: router_command({"name": name}, 2, "MODEL", "sglang") for name in ROUTERS}
    assert all(texts.values()) and "--policy cache_aware" in texts["sglang-cache-aware"]
    assert "--worker-urls http://replica-1:8000 http://replica-2:8000" in texts["sglang-cache-aware"]
    assert "--data-parallel-size 2" in texts["vllm-dp"] and "--routing-logic prefixaware" in texts["production-stack"]
    of_vllm = router_command({"name": "sglang-cache-aware"}, 2, "MODEL", "vllm")
    assert of_vllm == texts["sglang-cache-aware"].replace("python -m sglang_router.launch_router", "vllm-router")
    pools = [{"name": "p", "role": "prefill", "replicas": 1}, {"name": "d", "role": "decode", "replicas": 2}]
    apart = apart_command(pools, "sglang")
    assert "--disaggregation-mode prefill" in apart and "--decode http://decode-2:8000" in apart
    assert "1 for prefill and 2 for decode" in apart_command(pools, "mindie")
    assert "queue-scorer weight 2" in texts["llm-d"] and "least_conn;" in texts["least-requests"]
