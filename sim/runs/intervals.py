"""Intervals of the metrics of a run: repeat it with cost models that represent the uncertainty of the profile.

All draws serve the same requests. Draw k is the same cost model in every scenario, so that differences are paired. The
interval of a single run is a prediction for a measurement: it also has the noise of steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from servesim.config.scenario import Scenario
from servesim.core.limits import DEFAULT_DRAWS
from servesim.costs.device_profile import Profile
from servesim.traces.trace import Trace

from .metric_table import metrics_in, unit_of
from .notes import note
from .simulate import load_trace, simulate

CONFIDENCE = 0.95


class Draw(NamedTuple):
    """One of several cost models that represent the uncertainty of a profile."""

    number: int
    total: int = DEFAULT_DRAWS
    noise: bool = False  # with the measured noise of steps, different in every draw

    def scenario(self, scenario: Scenario) -> Scenario:
        """Return the scenario of this draw. Its requests are those of the original one: load them before."""
        if not self.noise:
            return scenario
        return scenario.model_copy(update={"noise": True, "seed": scenario.seed * self.total + self.number})


def draws_of(profile: Profile, count: int) -> list[Draw]:
    """Return the draws that predict a measured run: with the noise of steps if the profile has it."""
    return [Draw(number, count, bool(profile.about.get("noise"))) for number in range(count)]


def simulate_draws(
    scenario: Scenario,
    profile: Profile,
    count: int = DEFAULT_DRAWS,
    trace: Optional[Trace] = None,
    simulate_one: Callable[..., Any] = simulate,
) -> list[Mapping[str, Any]]:
    """Return the results of all draws, in the form of result.json, one after the other."""
    trace = load_trace(scenario) if trace is None else trace
    pairs = zip(draws_of(profile, count), profile.representatives(count))
    return [simulate_one(draw.scenario(scenario), trace, profile=drawn).result() for draw, drawn in pairs]


def intervals_of(
    result: Mapping[str, Any], draws: Sequence[Mapping[str, Any]], profile: Profile, confidence: float = CONFIDENCE
) -> dict[str, Any]:
    """Return the key `intervals` of result.json; `draws` are the results of `simulate_draws`."""
    complete = [draw for draw in draws if not draw.get("stuck")]
    metrics = {}
    for name in metrics_in("intervals"):
        values = [draw[name] for draw in complete if draw.get(name) is not None]
        if result.get(name) is not None and 1 < len(values) == len(complete):
            metrics[name] = list(prediction_interval(result[name], values, confidence))
    uncertainty = profile.uncertainty
    return {
        "draws": len(draws),
        "stuck": len(draws) - len(complete),
        "confidence": confidence,
        "fit": bool(uncertainty.draws),
        "session": uncertainty.session,
        "noise": bool(profile.about.get("noise")),
        "metrics": metrics,
    }


def prediction_interval(value: float, draws: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the limits between which another draw is expected; they include the value of the fitted costs.

    Normal on a logarithmic scale: times are positive, and near saturation they can grow more than shrink.
    """
    positive = min(draws) > 0
    values = [math.log(draw) for draw in draws] if positive else list(draws)
    centre, half_width = statistics.fmean(values), half_width_of_draws(values, confidence)
    limits = centre - half_width, centre + half_width
    low, high = (math.exp(limits[0]), math.exp(limits[1])) if positive else limits
    return min(low, value), max(high, value)


def half_width_of_draws(values: Sequence[float], confidence: float) -> float:
    """Return the half-width of the interval of the draws: normal, because draws are representative and not random."""
    if len(values) < 2:
        return 0.0
    return statistics.NormalDist().inv_cdf((1 + confidence) / 2) * statistics.stdev(values)


def describe_intervals(intervals: Mapping[str, Any], profile: str) -> list[str]:
    """Return what the intervals include, in one or two lines."""
    session = f"the spread between sessions ({100 * intervals['session']:.2g} %)"
    parts = [*(["the fit"] if intervals["fit"] else []), session, *(["noise of steps"] if intervals["noise"] else [])]
    lines = [f"intervals: {intervals['draws']} draws of the cost model; calibration uncertainty: {', '.join(parts)}"]
    if not intervals["fit"]:
        lines.append(note("no uncertainty", profile=profile).text)
    if intervals["stuck"]:
        lines.append(f"the engine got stuck in {intervals['stuck']} of the draws; the intervals leave them out")
    return lines


def format_interval(metric: str, value: float, low: float, high: float) -> str:
    """Return `16.0 ms [14.8, 17.9]`, with two digits of the width."""
    unit = unit_of(metric, [value])
    value, low, high = (number / unit.divisor for number in (value, low, high))
    digits = 2 if high <= low else min(6, max(0, 1 - math.floor(math.log10(high - low))))
    return f"{value:,.{digits}f} {unit.name}".strip() + f" [{low:,.{digits}f}, {high:,.{digits}f}]"
