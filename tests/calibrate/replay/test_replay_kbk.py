"""A replay on MindSpore, on a CPU with a small Llama: equal decisions, and the error comes from step times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.live.setup import DeviceSession
from servesim.calibrate.replay.replay import replay_on_backend
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost

from ..device.kbk_host import kbk_python

pytestmark = [pytest.mark.kbk, pytest.mark.timeout(1800)]

ENGINE = {"num_blocks": 11, "block_size": 16, "host_blocks": 11, "max_model_len": 200}
POLICIES: dict[str, dict[str, Any]] = {
    "stock": {"name": "llm-serving", "decode_batch": 4},
    "swapped queue": {"name": "llm-serving", "decode_batch": 6, "preempted_to": "swapped", "prefill_batch": 2},
    "swap to the host": {"name": "vllm", "preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 6},
    "chunked": {"name": "sarathi", "chunk_size": 32, "max_num_seqs": 4},
}


def burst() -> list[Request]:
    """Return requests that all arrive at time 0, so that decisions do not depend on the clock."""
    return [Request(id, 0.0, 20 + 7 * (id % 5), 12 + 5 * (id % 4)) for id in range(8)]


def scenario_of(policy: dict[str, Any]) -> Scenario:
    return scenario_from({"policy": policy, "engine": ENGINE})


@pytest.fixture(scope="module")
def session() -> Iterator[DeviceSession]:
    with DeviceSession("kbk", "micro", kbk_python()) as session:
        session.load([scenario_of(POLICIES["stock"])])
        yield session


@pytest.fixture(scope="module")
def profile(session: DeviceSession) -> Profile:
    """Step costs fitted to runs of another workload on the same device."""
    calls: list[Any] = []
    for name in ("stock", "chunked"):
        other = [Request(id, 0.0, 16 + 9 * (id % 6), 10 + 3 * (id % 5)) for id in range(6)]
        replayed = replay_on_backend(session, "probe", scenario_of(POLICIES[name]), other, None, warm_up=3)
        calls += replayed.live.model_calls
    shapes = [call.shape for call in calls]
    rows = [[s.prefill_rows > 0, s.prefill_tokens, s.decode_rows > 0, s.decode_live, s.context] for s in shapes]
    took = [call.end - call.called for call in calls]
    solution, *_ = np.linalg.lstsq(np.array(rows, float), np.array(took), rcond=None)
    prefill, token, decode, row, context = (max(0.0, float(value)) for value in solution)
    cost = LinearCost(prefill=prefill, prefill_token=token, decode_step=decode, decode_live=row, context=context)
    return Profile("measured here", cost, {"device": session.about["device"], "kernels": "reference"})


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_are_identical_and_the_error_comes_from_step_times(
    name: str, session: DeviceSession, profile: Profile, record_property: Any
) -> None:
    replayed = replay_on_backend(session, name, scenario_of(POLICIES[name]), burst(), profile, warm_up=3)
    comparison = replayed.comparison
    assert comparison.decisions.identical
    assert replayed.live.result()["completed"] == 8
    assert replayed.live.extra["blocks_left"] == replayed.live.extra["blocks"]
    makespan = comparison.row("makespan")
    assert makespan.from_decisions == pytest.approx(0.0, abs=1e-9)
    assert makespan.from_step_times == pytest.approx(makespan.error)
    record_property("makespan_error_from_step_times", makespan.from_step_times)
    print(json.dumps({"policy": name, "makespan error from step times": makespan.from_step_times}))
