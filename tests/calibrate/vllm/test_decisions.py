"""Recorded decisions of a real vLLM server against the simulation, in a burst with preemptions.

tests/recordings/vllm-server/burst.jsonl.gz: vLLM 0.32.0 on a CPU, 64 blocks of 32 tokens, 100 requests sent at once.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.replay.comparison_text import describe_decisions
from servesim.calibrate.replay.verify import Comparison
from servesim.calibrate.vllm import recording as recording_module
from servesim.calibrate.vllm.decisions import compare_decisions
from servesim.calibrate.vllm.recording import Recording, open_recording, seconds_per_request
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.linear import LinearCost
from servesim.files.step_table import read_steps
from servesim.runs.build import copy_requests
from servesim.runs.decision_log import InMemoryLog
from servesim.runs.run_folder import RunData
from servesim.runs.simulate import load_trace, simulate
from servesim.traces.make.synth import synthesise
from servesim.traces.trace import Trace

WORKLOAD: dict[str, Any] = {
    "requests": 100,
    "arrivals": {"kind": "poisson", "rate": 100000},
    "lengths": {
        "kind": "lognormal",
        "prompt": {"mean": 100, "sd": 60, "max": 400},
        "output": {"mean": 60, "sd": 40, "max": 200},
    },
}
COST = LinearCost(0.1, prefill_token=0.0005, decode_row=0.003)


@pytest.fixture
def recording(recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    monkeypatch.setattr(recording_module, "WRITTEN_S", 0.0)
    path = tmp_path / "burst.jsonl"
    path.write_bytes(gzip.decompress((recordings / "vllm-server" / "burst.jsonl.gz").read_bytes()))
    return open_recording(path)


def burst() -> list[Request]:
    """The requests of the recording, all sent at time 0."""
    return [Request(one.id, 0.0, one.prompt, one.output) for one in synthesise(WORKLOAD, seed=3).requests]


def scenario_of(recording: Recording, **policy: Any) -> Scenario:
    tree = recording.scenario("ascend910b4-llama2-7b", WORKLOAD)
    return scenario_from({**tree, "policy": {**tree["policy"], **policy}})


def test_with_recorded_arrivals_and_step_times_every_decision_is_that_of_the_server(recording: Recording) -> None:
    steps = recording.steps()
    found = compare_decisions(scenario_of(recording), burst(), steps, Profile("x", COST))
    assert found is not None and found.identical and found.same == len(steps) == 642
    other = compare_decisions(scenario_of(recording, max_num_seqs=10), burst(), steps, Profile("x", COST))
    assert other is not None and other.same < 10 and 0 < other.alike < 642
    text = describe_decisions(Comparison("", RunData({}, {}), RunData({}, {}), (), other, ()))
    assert f"{other.alike / 642:.1%} of the measured steps are equal at the same index" in text[0]


def test_decisions_without_recorded_arrivals_are_not_compared(recording: Recording) -> None:
    steps = [step._replace(cells={**step.cells, "arrived": ""}) for step in recording.steps()]
    assert compare_decisions(scenario_of(recording), burst(), steps, Profile("x", COST)) is None


def test_the_preemptions_of_a_burst_need_a_front_end_that_passes_on_requests_one_by_one(recording: Recording) -> None:
    steps = recording.steps()
    measured = sum(len(json.loads(step.cells["preempted"])) for step in steps)
    per_request = seconds_per_request(steps, [100])
    assert measured == 37 and 0.0005 < per_request < 0.03
    simulated = {}
    for seconds in (0.0, per_request):
        profile = Profile("x", COST, {"front_end": {"per_request": seconds}})
        run = simulate(scenario_of(recording), Trace(burst(), "burst", "synth"), profile=profile)
        simulated[seconds] = run.result()["preemptions"]
    assert abs(simulated[per_request] / measured - 1) < 0.1 < abs(simulated[0.0] / measured - 1), simulated


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("rate", [2, 30])
def test_the_simulation_repeats_its_own_decisions(is_async: bool, rate: float, tmp_path: Path) -> None:
    """Also with two steps in flight, where a step is decided before the last one has returned."""
    scenario = scenario_from({
        "workload": {**WORKLOAD, "requests": 40, "arrivals": {"kind": "poisson", "rate": rate}},
        "engine": {"num_blocks": 60, "max_model_len": 800, "front_end": {"seconds": 0.003, "per_request": 0.004}},
        "policy": {"name": "vllm-v1", "async_scheduling": is_async},
        "profile": {"base": 0.01, "prefill_token": 1e-4},
    })  # fmt: skip
    log, arrived = InMemoryLog(), []
    simulate(scenario, observers=[log])
    with (tmp_path / "steps.jsonl").open("w", encoding="utf-8") as file:
        for row in log.rows:
            arrived += [(f"cmpl-{id}-0", row["t"], row["t"]) for id in row["arrived"]]
            if tokens := dict(row["chunks"]):
                prompts = [(f"cmpl-{id}-0", tokens[id], 0) for id in row["prompts"]]
                rows = len(tokens) - len(prompts)
                step = {"step": row["step"], "start": row["t"], "end": row["t_end"], "arrived": arrived}
                step |= {"preempted": [f"cmpl-{id}-0" for id, _ in row["preempted"]], "batch": prompts}
                file.write(json.dumps({**step, "decode_rows": rows, "context": rows}) + "\n")
                arrived = []
    steps, requests = read_steps(tmp_path / "steps.jsonl"), copy_requests(load_trace(scenario).requests)
    found = compare_decisions(scenario, requests, steps, load_profile(scenario.profile))
    assert found is not None and found.identical and found.same > 200
