"""The length of the runs of a capacity: long enough that the answer does not depend on the length of the workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import servesim
import yaml
from servesim.config.scenario import scenario_from
from servesim.runs.request_rate import longer_scenario
from servesim.runs.simulate import load_trace
from servesim.study import pilot_runs
from servesim.study.sweep_text import format_result
from servesim.traces.export import export
from servesim.traces.make.synth import synthesise

from . import sweeps

BOUNDS = ["p99_ttft_ms <= 1000", "p99_itl_ms <= 50"]


def users(requests: int) -> dict[str, Any]:
    """The workload of the vLLM tutorial."""
    lengths = {
        "kind": "lognormal",
        "prompt": {"mean": 500, "sd": 500, "max": 3000},
        "output": {"mean": 200, "sd": 150, "max": 1000},
    }
    return {"requests": requests, "arrivals": {"kind": "gamma", "rate": 20, "burstiness": 0.5}, "lengths": lengths}


def chat(requests: dict[str, Any]) -> dict[str, Any]:
    """The server of the vLLM tutorial."""
    engine = {"device_memory": "143771MiB", "model": "llama2-7b", "max_model_len": 4096}
    policy = {"name": "vllm-v1", "max_num_seqs": 1024, "max_num_batched_tokens": 1024}
    return {**requests, "policy": policy, "profile": "h200-llama2-7b", "engine": engine}


def capacity(tree: dict[str, Any], **keys: Any) -> float:
    """The capacity of a server that can serve about 30 requests per second."""
    found = servesim.capacity(tree, subject_to=BOUNDS, rates=[25, 35], precision=0.02, **keys).rate
    assert found is not None
    return found


@pytest.mark.slow
def test_the_capacity_is_the_same_for_800_and_8000_requests(tmp_path: Path) -> None:
    """The file of 800 requests is that of the tutorial: as it is, it meets the limits up to 33 req/s."""
    path = tmp_path / "log.csv"
    export(synthesise(users(800)), path)
    long = capacity(chat({"workload": users(8000)}))
    assert 28 < long < 32
    assert capacity(chat({"trace": str(path)})) == pytest.approx(long, rel=0.05)
    assert capacity(chat({"workload": users(800)}), steady=True) == pytest.approx(long, rel=0.05)


def queue(requests: int = 200, **keys: Any) -> dict[str, Any]:
    """A D/D/1 queue that can serve 10 requests per second."""
    lengths = {"kind": "fixed", "prompt": 10, "output": 3}
    workload = {"requests": requests, "arrivals": {"kind": "constant", "rate": 1.0}, "lengths": lengths}
    costs = {"kind": "linear", "prefill": 0.04, "decode_step": 0.03}
    return {"workload": workload, "policy": {"name": "llm-serving"}, "profile": costs, **keys}


@pytest.mark.parametrize("bound", ["failed <= 0", "p99_tpot_ms <= 31", "p99_ttft_ms <= 60000"])
def test_a_rate_at_which_the_backlog_grows_is_no_capacity(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No constraint limits the waiting time, or only at the end of a very long run."""
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 2500)
    result = servesim.capacity(queue(20), subject_to=bound, rates=[4, 64], precision=0.02)
    assert result.rate == pytest.approx(10.0, rel=0.04)
    assert result.capacity.reason[0] == "saturated: the backlog grows"


@pytest.mark.parametrize("rates", ["auto", [80.0]])
def test_unserved_requests_miss_every_constraint_in_every_command(
    rates: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients give up after two seconds, so every request that is served has a TTFT below 2.5 s."""
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 400)
    tree, bound = queue(200, engine={"client_timeout": 2}), "p99_ttft_ms <= 2500"
    result = servesim.capacity(tree, subject_to=bound, rates=rates, precision=0.05)
    assert result.rate == pytest.approx(10.0, rel=0.1)
    words = ("-o", tmp_path / "out", "-j", 1, "-q", "--no-report", "--precision", "5%", "--subject-to", bound)
    (tmp_path / "tree.yaml").write_text(yaml.safe_dump(tree))
    at = () if rates == "auto" else ("--rates", rates[0])
    assert sweeps.sim("capacity", tmp_path / "tree.yaml", *words, *at) == 0
    assert f"up to {result.rate:.10g} req/s" in capsys.readouterr().out
    swept = servesim.sweep(
        base=tree, params={"policy.decode_batch": [1, 2]}, rates=rates, subject_to=[bound], precision=0.05
    )
    assert swept.capacity.capacity[0] == result.rate
    high = servesim.sweep(base=tree, params={"policy.decode_batch": [1]}, rates=[80, 90], subject_to=[bound])
    assert high.winner is None


def test_requests_that_no_rate_serves_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of 20 is longer than the model length; the others take 0.1 s each."""
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 400)
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n" + "".join(f"{k},{9999 if k == 7 else 10},3\n" for k in range(20)))
    tree = queue(engine={"max_model_len": 100}, trace=str(path))
    del tree["workload"]
    result = servesim.capacity(tree, subject_to="p99_ttft_ms <= 100", rates=[4, 64], precision=0.02)
    assert result.rate == pytest.approx(10 * 20 / 19, rel=0.03)
    assert "unserved at every rate: 20 requests" in format_result(result.summary)


def test_copies_of_a_trace_file_have_other_prompts(tmp_path: Path) -> None:
    """Otherwise a prefix cache would find the prompts of the first copy, and the capacity would be too high."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [0, 1]}\n'
                    '{"timestamp": 500, "input_length": 1000, "output_length": 9, "hash_ids": [0, 2]}\n')  # fmt: skip
    trace = load_trace(scenario_from(longer_scenario({"trace": str(path)}, 3)))
    assert [tuple(request.content.names) for request in trace.requests if request.content is not None] == [
        (0, 1), (0, 2), (3, 4), (3, 5), (6, 7), (6, 8),
    ]  # fmt: skip
    assert [request.arrival for request in trace.requests] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


def test_runs_that_are_too_short_give_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes 6 s, so at 4 requests per second a quarter of the 100 requests is in the server."""
    monkeypatch.setattr(pilot_runs, "MAX_REQUESTS", 100)
    tree = queue(100, policy={"name": "llm-serving", "decode_batch": 64})
    tree["workload"]["lengths"] = {"kind": "fixed", "prompt": 10, "output": 200}
    result = servesim.capacity(tree, subject_to="p99_ttft_ms <= 1000", rates=[4, 64], precision=0.05)
    assert "req/s (upper bound); at " in result.verdict and result.capacity.upper_bound[0]
    assert "upper bound: 1 configuration (the runs have too few requests" in format_result(result.summary)
