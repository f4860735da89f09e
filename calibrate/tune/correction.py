"""Correct a profile with measured runs: a new fit to their steps, or factors from their request times.

Shapes that no run measured keep the times of the earlier profile, multiplied by measured / predicted time of their kind
of step. So the earlier profile gives the form of the curves there, and the measurements give their level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
from servesim.calibrate.live.setup import check_same_device
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import ObservedRun, Runs
from servesim.calibrate.probe.fit import draws_with_host
from servesim.calibrate.probe.fitted_profile import profile_from
from servesim.calibrate.probe.host_overhead import fit_overhead, overhead_samples
from servesim.calibrate.probe.sample_set import Samples, predict
from servesim.core import BadInput, Shape
from servesim.costs.derived import without_host
from servesim.costs.device_profile import Profile
from servesim.costs.parts import HostPart, PartsCost
from servesim.costs.uncertainty import SESSION_SPREAD
from servesim.files.step_table import ModelCall
from servesim.runs.run_folder import RunData
from servesim.traces.trace import Trace

from .step_times import StepFactors, in_parts, modelled_steps, region, scaled_parts

MIN_SPREAD = 0.002  # of a factor, after measurements
# Request times show the speed of all steps well, but less well how prompts and decodes share the error.
FACTOR_PRIORS = {"factor": 0.5, "decode_ratio": 0.2}  # relative widths
FIT_KEYS = ("fit", "error", "check", "error_by_range", "total_error", "tied", "noise", "uncertainty", "grid")


class Factors(NamedTuple):
    """Numbers for steps with prompts and for steps without."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True)
class Correction:
    """A corrected profile."""

    profile: Profile
    factors: Factors  # measured / predicted seconds
    spread: Factors  # relative standard deviation that remains
    samples: Samples | None = None  # of the fit
    measured: int = 0  # how many of them were measured, the first ones
    note: str = ""  # why it is not a fit to the steps


def correct_from_steps(
    profile: Profile, runs: Mapping[str, Sequence[ModelCall]], shapes: Sequence[Shape], host_separate: bool
) -> Correction:
    """Fit the measured steps of runs, with the earlier profile where they have none.

    `host_separate`: the calls tell the host time from the device time.
    """
    live = {name: live_samples(calls, host_separate) for name, calls in runs.items()}
    measured = joined(list(live.values()))
    factors = step_factors(measured, profile)
    parts = in_parts(profile.cost, shapes, profile.about)
    earlier = replace(scaled_parts(parts, *factors), host=HostPart())
    known = {region(shape) for shape in measured.shapes}
    rest = [shape for shape in shapes if region(shape) not in known]
    samples = joined([measured, *([modelled_steps(rest, earlier)] if rest else [])])
    note = ""
    try:
        fitted = profile_from(samples, about_of(profile), "measured steps", f"{profile.name}-tuned")
    except BadInput as bad:
        note = f"the measured steps have no fit ({bad}); one factor per kind of step is used"
        fitted = Profile(f"{profile.name}-tuned", earlier, {**about_of(profile), "how": note})
    how = f"sim tune: {len(measured)} steps of {len(runs)} runs, {len(samples) - len(measured)} of the earlier profile"
    fitted = replace(fitted, about={**fitted.about, **({} if note else {"how": how})})
    if host_separate:
        fitted = with_host(fitted, [sample for calls in runs.values() for sample in overhead_samples(calls)])
    logs = np.log([step_factors(run, fitted) for run in live.values()])  # how much runs still differ
    spread = Factors(*(max(root_mean_square(kind.tolist()), MIN_SPREAD) for kind in logs.T))
    return Correction(fitted, factors, spread, samples, len(measured), note)


def live_samples(calls: Sequence[ModelCall], host_separate: bool) -> Samples:
    """Return the measured steps, without those that also copy blocks."""
    kept = [
        (call.end - (call.called if host_separate else call.start), call.shape)
        for call in calls
        if not call.shape.swapped and (call.shape.prefill_rows or call.shape.decode_rows)
    ]
    kept = [(seconds, shape) for seconds, shape in kept if seconds > 0]
    return Samples.from_shapes([shape for _, shape in kept], [seconds for seconds, _ in kept])


def joined(parts: Sequence[Samples]) -> Samples:
    """Return the samples of several sets as one; equal shapes are one point."""
    seconds = np.concatenate([part.seconds for part in parts]).tolist()
    return Samples.from_shapes([shape for part in parts for shape in part.shapes], seconds)


def step_factors(measured: Samples, profile: Profile) -> Factors:
    """Return measured / predicted total time of steps with prompts and of steps without; 1 if there are none."""
    predicted, prompts = predict(without_host(profile.cost), measured.table), measured.column("prefill_rows") > 0
    factors = []
    for own in (prompts, ~prompts):
        total = float(predicted[own].sum())
        factors.append(float(measured.seconds[own].sum()) / total if total > 0 else 1.0)
    return Factors(*factors)


def root_mean_square(values: Sequence[float], count: Optional[int] = None) -> float:
    """Return the root of the mean square, with another divisor if `count` is given; 0 if there is none."""
    count = len(values) if count is None else count
    return math.sqrt(sum(value * value for value in values) / count) if count > 0 else 0.0


def on_device(profile: Profile, about: Any, say: Callable[[str], None]) -> Profile:
    """Return the profile with the description of the device and the model that were measured."""
    if not isinstance(about, Mapping):
        return profile
    try:
        check_same_device(profile, about)
    except BadInput:
        say(f"profile {profile.name} is of another device or model; the measurements correct it")
    if about.get("sampling"):  # the corrected steps select tokens as the measured ones
        about = {**about, "sampling": {**(profile.about.get("sampling") or {}), "used": about["sampling"]}}
    return replace(profile, about={**profile.about, **about})


def about_of(profile: Profile) -> dict[str, Any]:
    """Return the description of a profile without the results of its fit."""
    return {key: value for key, value in profile.about.items() if key not in FIT_KEYS}


def with_host(profile: Profile, samples: Sequence[Sequence[float]]) -> Profile:
    """Return a profile with the measured host time, also in the draws of its uncertainty."""
    host = fit_overhead(samples)
    assert isinstance(profile.cost, PartsCost)
    draws = draws_with_host(profile.cost, profile.uncertainty.draws, host)
    uncertainty = {"session": SESSION_SPREAD, "draws": draws}
    cost = replace(profile.cost, host=host)
    return replace(profile, cost=cost, about={**profile.about, "uncertainty": uncertainty})


def correct_from_requests(profile: Profile, runs: Sequence[RunData], shapes: Sequence[Shape]) -> Correction:
    """Fit one factor for steps with prompts and one for the others to the request times of runs."""
    start = StepFactors(in_parts(profile.cost, shapes, profile.about))
    observed = [observed_run(run) for run in runs]
    fit = fit_logs(Runs("tune", observed, start, FACTOR_PRIORS), leave_out=False)
    assert isinstance(fit.cost, StepFactors)
    factors = Factors(fit.cost.factor, fit.cost.factor * fit.cost.decode_ratio)
    common, ratio = (max(MIN_SPREAD, min(float(error), 1.0)) for error in fit.errors)
    spread = Factors(common, math.hypot(common, ratio))
    note = "the server reports no step times; two factors were fitted to the request times"
    about = {**about_of(profile), "how": f"sim tune: {note}", "uncertainty": {"session": max(spread)}}
    return Correction(Profile(f"{profile.name}-tuned", fit.cost.scaled, about), factors, spread, note=note)


def observed_run(run: RunData) -> ObservedRun:
    """Return a measured run as the input of a fit to request times."""
    assert run.scenario is not None
    assert run.sent is not None
    start = min(request.sent for request in run.sent)
    index, first, end = [], [], []
    for k, request in enumerate(run.sent):
        row = run.requests[str(request.id)]
        if row["outcome"] == "finished" and row["first_token"] is not None:
            index.append(k)
            first.append(row["first_token"] - start)
            end.append(row["finish"] - start)
    if not index:
        raise BadInput(f"{run.name}: no request was finished: the profile cannot be corrected")
    makespan = max(end) if len(index) == len(run.sent) else None
    trace = Trace(list(run.sent), "replay", "synth")
    return ObservedRun(run.name, run.scenario, trace, makespan, np.array(index), np.array(first), np.array(end))
