"""The vLLM adapter with a stand-in for vLLM's scheduler: what it carries out, what it refuses, and its log."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from servesim.calibrate.adapter import vllm_scheduler
from servesim.calibrate.adapter.vllm_decisions import client_id
from servesim.calibrate.adapter.vllm_scheduler import LoggedScheduler, PolicyScheduler
from servesim.cli import main
from servesim.core import Chunk, Plan, Policy, View

from .vllm_standin import Entry, Pause, config, modules

Start = Callable[..., Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function that starts a server with a policy inside."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    vllm_scheduler.scheduler_class.cache_clear()

    def scheduler(policy: Any = None, kind: Any = PolicyScheduler, **settings: Any) -> Any:
        monkeypatch.setenv("SERVESIM_POLICY", json.dumps(policy or {}))
        return kind(config(**settings))

    return scheduler


def serve(scheduler: Any, steps: int = 1000) -> list[dict[str, int]]:
    """Run a server until all requests are done; return the tokens of each step."""
    batches = []
    while scheduler.requests and len(batches) < steps:
        output = scheduler.schedule()
        scheduler.update_from_output(output, None)
        batches.append(output.num_scheduled_tokens)
    return batches


def add(scheduler: Any, *sizes: tuple[int, int]) -> None:
    for number, (prompt, output) in enumerate(sizes):
        scheduler.add_request(Entry(f"cmpl-{number}-0-0123abcd", prompt, output, arrival=float(number)))


def test_the_policy_decides_which_request_vllm_admits(start: Start) -> None:
    stock, sorted_ = start(kind=LoggedScheduler, seats=1), start({"order": "shortest-output"}, seats=1)
    for scheduler in (stock, sorted_):
        add(scheduler, (8, 5), (8, 3), (8, 1))
    assert [next(iter(batch)).split("-")[1] for batch in serve(stock)] == list("000001112")
    assert [next(iter(batch)).split("-")[1] for batch in serve(sorted_)] == list("211100000")


def test_vllm_v1_takes_its_settings_from_the_flags_of_the_server(start: Start) -> None:
    flags = {"watermark": 0.25, "long_prefill_token_threshold": 7, "scheduler_reserve_full_isl": False}
    scheduler = start({"watermark": 0.5}, seats=3, tokens=40, flags=flags)
    policy = scheduler.policy_state.policy
    assert (policy.version, policy.max_num_seqs, policy.max_num_batched_tokens) == ("0.32.0", 3, 40)
    assert (policy.watermark, policy.long_prefill_token_threshold, policy.scheduler_reserve_full_isl) == (0.5, 7, False)
    assert (scheduler.kv_cache_manager.watermark_blocks, scheduler.scheduler_config.long_prefill_token_threshold) == (
        0,
        0,
    )


def test_a_preempted_request_waits_at_the_front_and_is_served_again(start: Start) -> None:
    scheduler = start(blocks=8)
    add(scheduler, (8, 12), (8, 12), (4, 4))
    batches = serve(scheduler)
    assert scheduler.free == 8 and not scheduler.held
    restarts = [list(batch) for batch in batches if max(batch.values()) > 8]
    assert restarts  # a prompt with the tokens that it had generated
    assert sum(sum(batch.values()) for batch in batches) > 8 + 8 + 4 + 12 + 12 + 4 - 3


def test_a_paused_server_runs_nothing_and_admits_nothing(start: Start) -> None:
    scheduler = start()
    add(scheduler, (8, 3))
    scheduler.pause_state = Pause.PAUSED_ALL
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.pause_state = Pause.PAUSED_NEW
    assert scheduler.schedule().num_scheduled_tokens == {} and len(scheduler.waiting) == 1
    scheduler.pause_state = Pause.UNPAUSED
    assert len(serve(scheduler)) == 3


class Planned(Policy):
    """Returns one plan."""

    plan: Callable[[View], Plan]

    def decide(self, view: View) -> Plan:
        return type(self).plan(view)


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (lambda view: Plan(chunks=[Chunk(view.waiting[0], 65)]), "a plan with 65 tokens: it was started for 64"),
        (lambda view: Plan(chunks=[Chunk(r, 1) for r in view.waiting]), "5 running requests: it was started for 4"),
        (lambda view: Plan(chunks=[Chunk(view.waiting[0], 60)]), "vLLM ran 0 of the 60 tokens that the plan has for"),
        (lambda view: Plan(admit=[view.waiting[0]]), "vLLM cannot run a plan with admit"),
    ],
)
def test_a_plan_that_vllm_cannot_run_ends_the_engine_with_one_line(start: Start, plan: Any, line: str) -> None:
    scheduler = start(blocks=12)
    add(scheduler, *[(80, 3)] * 5)
    scheduler.policy_state.policy = type("Mine", (Planned,), {"plan": staticmethod(plan)})()
    with pytest.raises(SystemExit) as error:
        scheduler.schedule()
    assert line in str(error.value) and "\n" not in str(error.value)


def test_blocks_that_the_plan_reserves_are_allocated(start: Start) -> None:
    scheduler = start({"name": "orca", "max_num_seqs": 2}, blocks=20)
    add(scheduler, (8, 12))
    scheduler.schedule()
    assert len(scheduler.held["cmpl-0-0-0123abcd"]) >= 5  # of 20 tokens
    scheduler = start({"name": "sarathi", "chunk_size": 8}, blocks=20)
    add(scheduler, (24, 12))
    scheduler.schedule()
    assert len(scheduler.held["cmpl-0-0-0123abcd"]) == 6  # of the prompt


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("cmpl-12-0-0123abcd", 12), ("cmpl-12-0", 12), ("chatcmpl-12-0123abcd", 12), ("cmpl-r07-0-ffffffff", "r07"),
        ("cmpl-a-b-3-0123abcd", "a-b"), ("r001", "r001"), ("cmpl-007-0-0123abcd", "007"),
    ],
)  # fmt: skip
def test_the_log_has_the_ids_that_the_client_sent(id: str, name: Any) -> None:
    assert client_id(id) == name


def test_sim_verify_compares_the_log_with_a_simulation(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [(8, 12), (8, 12), (4, 4), (6, 9), (7, 2)]
    trace, scenario = tmp_path / "trace.csv", tmp_path / "scenario.yaml"
    trace.write_text("arrival,prompt,output\n" + "".join(f"0,{prompt},{output}\n" for prompt, output in sizes))
    settings = {"name": "vllm-v1", "max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False}
    policy = {**settings, "enable_prefix_caching": False}
    engine = {"num_blocks": 8, "block_size": 4, "max_model_len": 1000}
    scenario.write_text(json.dumps({"policy": policy, "engine": engine, "trace": str(trace)}))
    for folder in ("sim", "live"):
        words = ["-q", "-o", str(tmp_path / folder), "--decisions", str(tmp_path / folder / "decisions.jsonl")]
        assert main(["run", str(scenario), *words]) == 0
    path = tmp_path / "live" / "decisions.jsonl"
    simulated = path.read_text().splitlines()
    path.unlink()
    monkeypatch.setenv("SERVESIM_DECISIONS", str(path))
    scheduler = start(blocks=8)
    add(scheduler, *sizes)
    serve(scheduler)
    lines = path.read_text().splitlines()
    assert {*json.loads(lines[0]), "cached"} == {*json.loads(simulated[0]), "cached"}
    assert any(json.loads(line)["preempted"] for line in lines)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "sim"), str(tmp_path / "live")]) == 0
    assert f"decisions: identical, {len(lines)} steps" in capsys.readouterr().out
    path.write_text("\n".join([*lines[:3], lines[3].replace('"decode"', '"mixed"'), *lines[4:]]))
    assert main(["verify", str(tmp_path / "sim"), str(tmp_path / "live")]) == 0
    assert "decisions: identical" not in capsys.readouterr().out


def test_the_log_has_waiting_requests_in_the_order_of_the_policy(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the decision log of a simulation: the shortest answer first, not the oldest request."""
    path = tmp_path / "decisions.jsonl"
    monkeypatch.setenv("SERVESIM_DECISIONS", str(path))
    scheduler = start({"name": "vllm-v1", "order": "shortest-output"}, seats=1)
    add(scheduler, (4, 6), (4, 5), (4, 2), (4, 3))
    serve(scheduler)
    first, second, *_ = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["running"] == [2] and first["waiting"] == [3, 1, 0]
    assert second["waiting"] == [3, 1, 0]
