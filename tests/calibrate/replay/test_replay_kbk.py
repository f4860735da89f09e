"""A replay on real MindSpore, on a CPU with a small Llama: decisions equal, the step times' part of the error told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.live.setup import Stage
from servesim.calibrate.replay.replay import replay_on
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost

from ..device.kbk_host import kbk_python

pytestmark = [pytest.mark.kbk, pytest.mark.live, pytest.mark.timeout(600)]

ENGINE = {"num_blocks": 11, "block_size": 16, "host_blocks": 11, "max_model_len": 200}
POLICIES: dict[str, dict[str, Any]] = {
    "stock": {"name": "llm-serving", "decode_batch": 4},
    "swapped queue": {"name": "llm-serving", "decode_batch": 6, "evicted": "swapped", "prefill_batch": 2},
    "swap to the host": {"name": "vllm", "preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 6},
    "chunked": {"name": "sarathi", "chunk_size": 32, "max_num_seqs": 4},
}


def burst() -> list[Request]:
    """Return requests that are all there from the start, so that no clock has a say in what is decided."""
    return [Request(id, 0.0, 20 + 7 * (id % 5), 12 + 5 * (id % 4)) for id in range(8)]


def scenario_of(policy: dict[str, Any]) -> Scenario:
    return scenario_from({"policy": policy, "engine": ENGINE})


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage("kbk", "micro", kbk_python()) as stage:
        stage.load([scenario_of(POLICIES["stock"])])
        yield stage


@pytest.fixture(scope="module")
def profile(stage: Stage) -> Profile:
    """Step costs read off a run of another workload on the same device."""
    calls: list[Any] = []
    for name in ("stock", "chunked"):
        other = [Request(id, 0.0, 16 + 9 * (id % 6), 10 + 3 * (id % 5)) for id in range(6)]
        calls += replay_on(stage, "probe", scenario_of(POLICIES[name]), other, None, warm_up=3).live.model_calls
    shapes = [call.shape for call in calls]
    rows = [[s.prefill_rows > 0, s.prefill_tokens, s.decode_rows > 0, s.decode_live, s.context] for s in shapes]
    took = [call.end - call.called for call in calls]
    found, *_ = np.linalg.lstsq(np.array(rows, float), np.array(took), rcond=None)
    prefill, token, decode, row, context = (max(0.0, float(value)) for value in found)
    cost = LinearCost(prefill=prefill, prefill_token=token, decode_step=decode, decode_live=row, context=context)
    return Profile("measured here", cost, {"device": stage.about["device"], "kernels": "reference"})


@pytest.mark.parametrize("name", POLICIES)
def test_simulated_and_live_decide_alike_and_the_error_is_the_step_times(
    name: str, stage: Stage, profile: Profile, record_property: Any
) -> None:
    replayed = replay_on(stage, name, scenario_of(POLICIES[name]), burst(), profile, warm_up=3)
    found = replayed.comparison
    assert found is not None
    assert found.decisions is not None
    assert found.decisions.identical
    assert replayed.live.result()["completed"] == 8
    assert replayed.live.extra["blocks_left"] == replayed.live.extra["blocks"]
    makespan = found.line("makespan")
    assert makespan.decisions == pytest.approx(0.0, abs=1e-9)  # nothing is left once step times are as measured
    assert makespan.steps == pytest.approx(makespan.error)
    record_property("makespan_error_from_step_times", makespan.steps)
    print(json.dumps({"policy": name, "makespan error from step times": makespan.steps}))
