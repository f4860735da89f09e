"""Runs that the page watches: the same results, few calls of observers, cancelling."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
from servesim.config.registry import preset as preset_keys
from servesim.config.registry import presets
from servesim.config.scenario import scenario_from
from servesim.explorer import worker
from servesim.runs.simulate import load_trace, simulate
from servesim.study.executor import MAX_RETRIES, Pool
from servesim.study.single_run import Task, context_json

from ..events import wait_until

WORKLOAD = {"requests": 40, "arrivals": {"kind": "poisson", "rate": 6}, "lengths": {"kind": "contest"}}


class Counting(worker.Watch):
    """Also counts its calls."""

    calls = 0

    def on_step_start(self, *arguments: Any) -> None:
        self.calls += 1
        super().on_step_start(*arguments)


@pytest.fixture
def shared() -> Iterator[list[Any]]:
    """Share arrays as the server does."""
    worker._shared[:] = [[0] * 8, [0.0] * 8]
    yield worker._shared
    worker._shared.clear()


@pytest.mark.parametrize("preset", sorted(presets()))
def test_a_watched_run_has_the_same_result(shared: list[Any], preset: str) -> None:
    tree = {**preset_keys(preset), "workload": WORKLOAD}
    tree["engine"] = {**tree.get("engine", {}), "num_blocks": 2048 // tree["engine"].get("block_size", 16)}
    scenario = scenario_from(tree)
    trace = load_trace(scenario)
    watch = Counting(3, len(trace))
    plain, watched = simulate(scenario, trace), simulate(scenario, trace, [watch])
    assert watched.result() == plain.result()
    times = [[(r.first_token, r.finish, r.queued, r.decoding) for r in run.requests] for run in (plain, watched)]
    assert times[0] == times[1]
    assert shared[1][3] == pytest.approx(plain.result()["completed"] / len(trace))


def test_a_run_goes_on_after_any_number_of_restarts_for_other_jobs() -> None:
    """On a slow machine, the workers do not react in time to several changes of the page."""
    submitted: list[Future[Any]] = []

    class Workers:
        def submit(self, *_: Any) -> Future[Any]:
            submitted.append(Future())
            return submitted[-1]

    def stop(_: Any) -> None:
        submitted[-1].set_exception(BrokenProcessPool())

    pool = Pool(Workers, lambda: 1, stop)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: list(pool.run("", [Task(0, 0, {})])))
        for number in range(1, 2 * MAX_RETRIES):
            wait_until(lambda: len(submitted) == number, "the run")  # noqa: B023
            pool.restart()
        wait_until(lambda: len(submitted) == 2 * MAX_RETRIES, "the last run")
        submitted[-1].set_result([{"requests": 1}])
        assert found.result() == [(0, {"requests": 1})]


def test_a_cancelled_run_ends_and_returns_nothing(shared: list[Any]) -> None:
    context, task = context_json({}), Task(0, 0, {**preset_keys("contest-baseline"), "workload": WORKLOAD})
    [record] = worker.run_watched(context, [task], 1)
    assert record["requests"] == 40 and max(record["running"]) == 1
    shared[0][1] = 1
    assert worker.run_watched(context, [task], 1) == [{}]
    scenario = scenario_from(dict(task.assignment))
    with pytest.raises(worker.Cancelled):
        simulate(scenario, load_trace(scenario), [worker.Watch(1, 40)])
