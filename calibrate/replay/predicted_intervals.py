"""Intervals of a replayed scenario: simulate it as a backend runs it, with random cost models and noise of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from servesim.calibrate.probe.host_overhead import CostWithHost, HostOverhead
from servesim.config.scenario import Scenario
from servesim.core import Request
from servesim.costs.device_profile import Profile
from servesim.engine.simulated import SimulatedClock
from servesim.runs.intervals import intervals_of, simulate_draws
from servesim.runs.simulate import Run, build_scenario_loop, copy_requests, run_loop
from servesim.traces.trace import Trace


def replay_intervals(
    run: Run, requests: Sequence[Request], profile: Profile, host: HostOverhead, draws: int
) -> dict[str, Any]:
    """Return the intervals of a simulated replay; the host overhead was measured, so it is the same in all draws."""

    def simulate_draw(scenario: Scenario, trace: Trace, profile: Profile) -> Run:
        if host != HostOverhead():
            profile = replace(profile, cost=CostWithHost(profile.cost, host))
        profile = profile.with_sampling(scenario.engine.sampling)
        clock = SimulatedClock(profile.with_noise(scenario.seed) if scenario.noise else profile.cost)
        copies = copy_requests(trace.requests)
        loop = build_scenario_loop(scenario, copies, clock, (), profile.front_end)
        return run_loop(loop, clock, scenario, profile, copies)

    trace = Trace(list(requests), "replay", "synth")
    return intervals_of(run.result(), simulate_draws(run.scenario, profile, draws, trace, simulate_draw), profile)
