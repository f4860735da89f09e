"""Why the check of a calibration has large errors: simulate it again without one cause at a time.

A cause is named if the largest error becomes less than half as large without it. So its direction and its size explain
the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Optional

from servesim.calibrate.imports.step_log import host_gap, timed_steps
from servesim.calibrate.replay.replay import ReplayedScenario
from servesim.calibrate.replay.verify import relative_error
from servesim.costs.derived import ScaledCost
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import simulate
from servesim.traces.trace import Trace

from .calibration import LARGE_ERROR, METRICS, FittedServer

EXPLAINED = 0.5  # of the largest error, that a cause must remove
SMALL_CHANGE = 0.002  # of step times: not worth a simulation
PROVE = "sim policies prove vllm-v1 --engine vllm"


def dominant_cause(fitted: FittedServer, replayed: ReplayedScenario) -> Optional[str]:
    """Return what explains the largest error of the check, or that nothing does; None if all errors are small."""
    assert replayed.comparison is not None
    rows = [row for row in map(replayed.comparison.row, METRICS) if row.exceeds(LARGE_ERROR)]
    if not rows:
        return None
    worst = max(rows, key=lambda row: abs(row.error or 0.0))
    if worst.error is None:
        return f"{worst.metric} has no value in one of both runs"
    left = {}
    for text, profile in causes(fitted, replayed):
        error = relative_error(metric_with(profile, replayed, worst.metric), worst.measured)
        left[text] = worst.error if error is None else error
    about = f"{worst.metric} {worst.error:+.1%}"
    named = min(left, key=lambda text: abs(left[text]), default=None)
    if named is not None and abs(left[named]) <= (1 - EXPLAINED) * abs(worst.error):
        return f"{named} (explains {about}: {left[named]:+.1%} without it)"
    effects = [f"{text} (changes it by {worst.error - error:+.1%})" for text, error in left.items()]
    unknown = f"not found: nothing that was measured explains {about}"
    return "; ".join([unknown, *effects, *other_causes(fitted, replayed)])


def metric_with(profile: Profile, replayed: ReplayedScenario, metric: str) -> Optional[float]:
    """Simulate the requests of the check with another profile, and return a metric."""
    assert replayed.run is not None
    trace = Trace(list(replayed.run.requests), "replay", "synth")
    value = simulate(replayed.run.scenario, trace, profile=profile).result().get(metric)
    return None if value is None else float(value)


def causes(fitted: FittedServer, replayed: ReplayedScenario) -> Iterator[tuple[str, Profile]]:
    """Yield what was different in the check, and the profile that simulates it as measured.

    It is what the recorder and the counters of the server show.
    """
    profile = fitted.profile
    timed = timed_steps(fitted.checked)
    measured, predicted = sum(timed.seconds.tolist()), sum(map(profile.cost.duration, timed.shapes))
    if len(timed) and predicted > 0:
        before, now = host_gap(fitted.steps), host_gap(fitted.checked)
        host = (now - before) * len(timed) / predicted
        rest = measured / predicted - 1 - host
        gaps = f"host time: {1e3 * now:.3g} ms between two steps in the check, {1e3 * before:.3g} ms before"
        more = "more" if rest > 0 else "less"
        steps = f"step times: the steps of the check took {abs(rest):.1%} {more} than predicted"
        for text, change in ((gaps, host), (steps, rest)):
            if abs(change) > SMALL_CHANGE:
                yield text, replace(profile, cost=ScaledCost(profile.cost, 1 + change))
    assert replayed.comparison is not None
    if (outside := replayed.comparison.row("mean_ttft_ms").outside_server) is not None:
        simulated, found = outside
        text = f"front end: {found:.3g} ms of the TTFT are outside the engine, {simulated:.3g} ms simulated"
        front_end = {**(profile.about.get("front_end") or {}), "seconds": max(0.0, found / 1e3)}
        yield text, replace(profile, about={**profile.about, "front_end": front_end})


def other_causes(fitted: FittedServer, replayed: ReplayedScenario) -> Iterator[str]:
    """Yield differences whose effect on the errors is not known."""
    assert replayed.comparison is not None
    preemptions = replayed.comparison.row("preemptions")
    if preemptions.measured is not None and preemptions.measured != preemptions.simulated:
        yield f"{preemptions.measured:.0f} preemptions measured, {preemptions.simulated or 0:.0f} simulated"
    recording = fitted.recording
    if recording.version != recording.simulated_version:
        yield f"vLLM {recording.version} runs, the rules of {recording.simulated_version} are simulated"
    if recording.unsimulated:
        yield f"settings that are not simulated: {', '.join(recording.unsimulated)}"
    decisions = replayed.comparison.decisions
    same = decisions is not None and decisions.identical
    yield "all decisions are those of the server" if same else f"`{PROVE}` compares the decisions"
