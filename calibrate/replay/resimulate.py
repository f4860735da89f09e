"""Simulate a measured run again, as a backend runs it: with the measured step times, or with random cost models.

With the measured step times, the error that remains does not come from step times.

While the simulation makes the same calls as the device, each call ends at its measured time. After the first different
call, steps take the profile's time, scaled by measured over predicted time of that kind of step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional

from servesim.calibrate.probe.host_overhead import measured_host
from servesim.config.scenario import Scenario
from servesim.core import Request, Shape, StepCost
from servesim.costs.device_profile import Profile, load_profile
from servesim.engine.loop import Loop
from servesim.engine.notices import Observer
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.files.step_table import ModelCall
from servesim.runs.build import build_scenario_loop, copy_requests
from servesim.runs.decision_log import InMemoryLog
from servesim.runs.intervals import intervals_of, simulate_draws
from servesim.runs.run_folder import RunData, run_data
from servesim.runs.simulate import Run, run_loop
from servesim.traces.trace import Trace

from .verify import Comparison, compare


class MeasuredCost(StepCost):
    """The measured time of each model call. The longest context may be unknown: not compared."""

    @property
    def deterministic(self) -> bool:
        return False

    def __init__(self, calls: Sequence[ModelCall], profile: StepCost) -> None:
        self.ends = [call.end for call in calls]
        self.shapes = [call.shape for call in calls]
        self.profile = profile
        self.loop: Optional[Loop] = None  # gives the current time
        self.calls_matched = 0
        self.diverged = False
        self.ratios = ratios(calls, profile)

    def seconds(self, shape: Shape) -> float:
        assert self.loop is not None
        index, in_flight = self.calls_matched, self.loop.server.flight
        if not self.diverged and index < len(self.ends) and self.is_same(self.shapes[index], shape):
            self.calls_matched += 1
            return max(0.0, self.ends[index] - (self.loop.now if in_flight is None else in_flight.end))
        self.diverged = True
        return self.profile.seconds(shape) * self.ratios.get(bool(shape.prefill_rows), 1.0)

    def is_same(self, measured: Shape, simulated: Shape) -> bool:
        """Whether a simulated call is the measured one."""
        return measured._replace(longest=0) == simulated._replace(longest=0)


def ratios(calls: Sequence[ModelCall], profile: StepCost) -> dict[bool, float]:
    """Return measured over predicted time, for steps with prefill (True) and without (False)."""
    sums: dict[bool, list[float]] = {}
    for call in calls:
        pair = sums.setdefault(bool(call.shape.prefill_rows), [0.0, 0.0])
        pair[0] += call.end - call.start
        pair[1] += profile.seconds(call.shape)
    return {kind: measured / predicted for kind, (measured, predicted) in sums.items() if predicted > 0}


def resimulate(live: RunData, profile: Profile, scenario: Optional[Scenario] = None) -> tuple[RunData, int]:
    """Simulate the requests of a live run with its step times, in its own or in another scenario.

    Return the simulated run and the number of leading calls that match the live run.
    """
    scenario = live.scenario if scenario is None else scenario
    assert scenario is not None
    assert live.sent is not None
    cost = MeasuredCost(live.calls, profile.cost)
    drafts = live.result.get("drafts")
    run, decisions = simulate_with_cost(scenario, copy_requests(live.sent), profile, cost, drafts)
    return run_data(run, decisions), cost.calls_matched


def simulate_with_cost(
    scenario: Scenario, requests: Sequence[Request], profile: Profile, cost: StepCost,
    drafts: Optional[Mapping[str, Any]] = None,
) -> tuple[Run, Sequence[Mapping[str, Any]]]:  # fmt: skip
    """Simulate unserved requests without padding, as a backend runs them; return the run and its decisions."""
    notes = InMemoryLog()
    run = simulate_live(scenario, requests, profile, cost, drafts, (notes,))
    return replace(run, padded_tokens=0, padded_rows=0), notes.rows  # a live run does not count padding


def simulate_live(
    scenario: Scenario, requests: Sequence[Request], profile: Profile, cost: StepCost,
    drafts: Optional[Mapping[str, Any]], observers: Sequence[Observer] = (),
) -> Run:  # fmt: skip
    """Simulate unserved requests with the drafts of a live run."""
    clock = SimulatedClock(cost)
    loop = build_scenario_loop(scenario, requests, clock, observers, profile.front_end)
    if isinstance(cost, MeasuredCost):
        cost.loop = loop
    repeat_drafts(loop.server, drafts)
    return run_loop(loop, [clock], scenario, profile, requests)


def repeat_drafts(server: Server, drafts: Optional[Mapping[str, Any]]) -> None:
    """Let the model accept what it accepted in a live run, of each request after as many tokens."""
    if server.drafts is None or drafts is None:
        return
    rows = {id: {written: row for written, *row in rows} for id, rows in drafts["requests"].items()}
    server.drafts.offer = lambda request: rows[str(request.id)].get(request.written, (0, 0))[0]
    server.drafts.accept = lambda request, count: rows[str(request.id)].get(request.written - 1 - count, (0, 0))[1]


def replay_intervals(
    run: Run, requests: Sequence[Request], profile: Profile, of_run: Callable[[Profile], Profile], draws: int,
    drafts: Optional[Mapping[str, Any]] = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the intervals of a simulated replay: draws of the cost model, with the noise of steps.

    `of_run` adds the host overhead of the run. It was measured, so it is the same in all draws.
    """

    def simulate_draw(scenario: Scenario, trace: Trace, profile: Profile) -> Run:
        profile = of_run(profile)
        cost = profile.with_noise(scenario.seed) if scenario.noise else profile.cost
        return simulate_live(scenario, copy_requests(trace.requests), profile, cost, drafts)

    trace = Trace(list(requests), "replay", "synth")
    return intervals_of(run, simulate_draws(run.scenario, profile, draws, trace, simulate_draw), profile)


def compare_runs(
    name: str, simulated: RunData, measured: RunData, profile: Optional[str] = None, percentiles: Sequence[float] = ()
) -> Comparison:
    """Compare two runs. The error is split into its sources if the measured run can be simulated again."""
    measured = replace(measured, name=name or measured.name)
    scenario, resimulated, calls_matched = simulated.scenario, None, None
    if measured.calls and measured.sent is not None and scenario is not None and scenario.policy_is_loadable:
        loaded = load_profile(profile or scenario.profile)
        of_run = loaded.for_run(scenario.engine.sampling, measured_host(measured.result))
        resimulated, calls_matched = resimulate(measured, of_run, scenario)
    return compare(simulated, measured, resimulated, calls_matched, percentiles)
