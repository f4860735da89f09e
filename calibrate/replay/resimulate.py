"""Simulate again with the measured step times: the error that is left does not come from them.

While the simulation makes the same calls as the device, its calls end when the device's did. After that, steps take the
profile's time, corrected by measured over predicted time of such steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional

from servesim.calibrate.probe.host_overhead import Host, Hosted
from servesim.config.scenario import Scenario
from servesim.core import Request, Shape, StepCost
from servesim.costs.device_profile import Profile, load_profile
from servesim.engine.loop import Loop
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import ModelCall
from servesim.runs.decision_log import Notes
from servesim.runs.run_folder import RunData, run_data
from servesim.runs.simulate import Run, build, fresh, run_loop

from .verify import Comparison, compare


class Measured(StepCost):
    """Step times as measured, call by call."""

    @property
    def steady(self) -> bool:
        return False

    def __init__(self, calls: Sequence[ModelCall], profile: StepCost) -> None:
        self.ends = [call.end for call in calls]
        self.shapes = [call.shape for call in calls]
        self.profile = profile
        self.loop: Optional[Loop] = None  # whose time says how long it is until a measured end
        self.followed = 0  # calls that went as measured
        self.strayed = False
        self.ratios = ratios(calls, self.shapes, profile)

    def seconds(self, shape: Shape) -> float:
        assert self.loop is not None
        place = self.followed
        if not self.strayed and place < len(self.ends) and self.shapes[place] == shape:
            self.followed += 1
            return max(0.0, self.ends[place] - self.loop.now)
        self.strayed = True
        return self.profile.seconds(shape) * self.ratios.get(bool(shape.prefill_rows), 1.0)


def ratios(calls: Sequence[ModelCall], shapes: Sequence[Shape], profile: StepCost) -> dict[bool, float]:
    """Return measured over predicted time, of the steps with prompts and of those without."""
    sums: dict[bool, list[float]] = {}
    for call, shape in zip(calls, shapes):
        pair = sums.setdefault(bool(shape.prefill_rows), [0.0, 0.0])
        pair[0] += call.end - call.start
        pair[1] += profile.seconds(shape)
    return {kind: took / told for kind, (took, told) in sums.items() if told > 0}


def resimulate(live: RunData, profile: Profile, scenario: Optional[Scenario] = None) -> tuple[RunData, int]:
    """Simulate a live run, or what another scenario makes of it, with the live step times.

    Return it, and how many calls went as they did live.
    """
    scenario = live.scenario if scenario is None else scenario
    assert scenario is not None
    assert live.sent is not None
    cost = Measured(live.calls, profile.cost)
    run, decisions = simulated(scenario, fresh(live.sent), profile, cost)
    return run_data(run, decisions), cost.followed


def simulated(
    scenario: Scenario, requests: Sequence[Request], profile: Profile, cost: StepCost
) -> tuple[Run, Sequence[Mapping[str, Any]]]:
    """Simulate fresh requests as a backend runs them, nothing padded; return the run and its decisions."""
    notes = Notes()
    clock = SimulatedClock(cost)
    loop = build(scenario, requests, clock, (notes,), profile.front_end)
    if isinstance(cost, Measured):
        cost.loop = loop
    run = run_loop(loop, clock, scenario, profile, requests)
    return replace(run, padded_tokens=0, padded_rows=0), notes.rows  # as the live run, which does not count them


def compare_runs(name: str, simulated: RunData, measured: RunData, profile: Optional[str] = None) -> Comparison:
    """Compare two runs, with the split of the error where the measured one has its calls."""
    measured = replace(measured, name=name or measured.name)
    if not measured.calls or measured.sent is None or simulated.scenario is None:
        return compare(simulated, measured)
    found = load_profile(profile or simulated.scenario.profile)
    host = Host(*measured.result.get("host", (0.0, 0.0)))
    again, followed = resimulate(measured, replace(found, cost=Hosted(found.cost, host)), simulated.scenario)
    return compare(simulated, measured, again, followed)
