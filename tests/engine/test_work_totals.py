"""Sums of the work of all model calls: equal to what an observer counts row by row, with and without held plans."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request
from servesim.engine.rules import rules_of
from servesim.engine.server import Server
from servesim.engine.step import Step, batch
from servesim.engine.work_totals import COUNTERS, work_from_json, work_to_json
from servesim.policies import POLICIES
from servesim.runs.simulate import Run, simulate
from servesim.testing import draw_requests
from servesim.traces.trace import Trace

from ..policy_values import random_fields

COST = {"base": 0.5, "prefill_token": 0.125, "decode_live": 0.25, "swap_block": 0.25}  # exact binary fractions


class RowByRow:
    """Counts every row of every step, from the requests themselves."""

    def __init__(self) -> None:
        self.sums: dict[str, Counter[str]] = {}

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        if step.kind not in ("prefill", "decode", "mixed"):
            return
        by_id = {request.id: request for request in server.running}
        prompts = {chunk.request.id for chunk in step.chunks}
        sums = self.sums.setdefault(step.kind, Counter())
        sums["steps"] += 1
        for id, tokens in batch(server.running, step):
            cached = by_id[id].cached
            pairs = sum(cached + position + 1 for position in range(tokens))
            if id in prompts:
                sums.update(prompts=1, prompt_tokens=tokens, prompt_pairs=pairs, prompt_cached=cached)
            else:
                sums.update(decode_rows=tokens, decode_pairs=pairs)

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        if step.kind in self.sums:
            self.sums[step.kind]["quarters"] += round(4e3 * (now - step.start))  # of a millisecond


def scenario(name: str, rng: random.Random) -> Scenario:
    engine = {"num_blocks": rng.choice([16, 40, 200]), "block_size": 4, "host_blocks": rng.choice([0, 32]),
              "max_model_len": 96}  # fmt: skip
    policy = random_fields(rng, POLICIES[name])
    if rules_of(POLICIES[name](**policy)).steps_in_flight == 1:
        engine["data_parallel_size"] = rng.choice([1, 1, 2, 3])
    return scenario_from({"policy": {"name": name, **policy}, "engine": engine, "profile": COST})


def counters(run: Run) -> dict[str, dict[str, Any]]:
    return {
        kind: {name: getattr(sums, name) for name in COUNTERS} for kind, sums in run.work.items() if sums.steps
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_sums_equal_those_of_all_rows_with_and_without_hold(name: str) -> None:
    rng, compared = random.Random(name), 0
    for seed in range(10):
        try:
            case, trace = scenario(name, rng), Trace(draw_requests(seed, 24), "test", "synth")
            observer = RowByRow()
            observed = simulate(case, trace, (observer,))
            runs = [observed, simulate(case, trace), simulate(case, trace, hold=False)]
        except (AssertionError, ValueError):
            continue  # an engine that is too small for the policy
        expected = {kind: {key: sums[key] for key in COUNTERS} for kind, sums in observer.sums.items()}
        for run in runs:
            assert counters(run) == expected
            for kind, sums in run.work.items():
                assert sums.seconds == pytest.approx(observer.sums.get(kind, Counter())["quarters"] / 4e3)
        compared += 1
    assert compared


def test_sums_survive_a_copy_as_json() -> None:
    run = simulate(scenario("vllm-v1", random.Random(1)), Trace(draw_requests(1, 24), "test", "synth"))
    copy = work_from_json(work_to_json(run.work))
    assert work_to_json(copy) == work_to_json(run.work) and copy["decode"].tokens > 0
