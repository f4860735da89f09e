"""Intervals of the metrics of a run: repeat it with cost models that represent the uncertainty of the profile.

All draws serve the same requests. Draw k is the same cost model in every scenario, so that differences are paired. The
interval of a single run is a prediction for a measurement: it also has the noise of steps.

Steps outside the measured range of the profile, and steps in flight that were measured one by one, have a spread of
their own. It is added to the spread between sessions: an interval widens by the ratio of both, because the draws show
how much a metric depends on the step times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.config.scenario import Scenario
from servesim.core.limits import DEFAULT_DRAWS
from servesim.costs.device_profile import Profile
from servesim.costs.uncertainty import OVERLAP_SPREAD, RANGE_SPREAD
from servesim.traces.trace import Trace

from .metric_table import digits_of, metrics_in, unit_of
from .notes import note
from .pools import profiles_of
from .saturation import Load, load_of
from .simulate import Run, load_trace, simulate

CONFIDENCE = 0.95
USELESS = 3.0  # near saturation, a TTFT whose upper limit is this many times the lower one is not predicted


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


def draws_of(profiles: Sequence[Profile], count: int) -> list[Draw]:
    """Return the draws that predict a measured run: with the noise of steps if all profiles of its servers have it."""
    return [Draw(number, count, have_noise(profiles)) for number in range(count)]


def have_noise(profiles: Sequence[Profile]) -> bool:
    """Whether all profiles have the noise of steps."""
    return all(profile.about.get("noise") for profile in profiles)


@dataclass(frozen=True)
class Spread:
    """The standard deviations of step times that intervals have; with several profiles, the largest ones."""

    fit: bool  # whether draws have the uncertainty of the fit
    session: float  # between sessions; the draws have it
    misfit: float
    outside: float
    overlap: float
    ttft: float  # of TTFT alone
    wider: float  # factor from the spread of the draws to that of all of these

    @classmethod
    def of(cls, run: Run, profiles: Sequence[Profile]) -> Spread:
        """Return the spread of a run whose servers have these profiles."""
        outside, wider = RANGE_SPREAD * run.distance_outside, 1.0
        measured = run.server.overlaps and any("backend" in profile.about for profile in profiles)
        overlap = OVERLAP_SPREAD if measured else 0.0  # measured one by one
        for profile in profiles:
            session = profile.uncertainty.session
            if session:
                wider = max(wider, math.hypot(session, profile.misfit, outside, overlap) / session)
        return cls(
            any(profile.uncertainty.draws for profile in profiles),
            max(profile.uncertainty.session for profile in profiles),
            max(profile.misfit for profile in profiles), outside, overlap,
            max(profile.uncertainty.ttft for profile in profiles), wider,
        )  # fmt: skip

    @property
    def total(self) -> float:
        """The standard deviation of all of these."""
        return math.hypot(self.session, self.misfit, self.outside, self.overlap)

    def as_result(self) -> dict[str, Any]:
        """Return the values under the keys of result.json."""
        return {name: getattr(self, name) for name in ("fit", "session", "ttft", "misfit", "outside", "overlap")}


def simulate_draws(
    scenario: Scenario,
    profile: Profile,
    count: int = DEFAULT_DRAWS,
    trace: Optional[Trace] = None,
    simulate_one: Callable[..., Any] = simulate,
) -> list[Mapping[str, Any]]:
    """Return the results of all draws, in the form of result.json, one after the other."""
    trace = load_trace(scenario) if trace is None else trace
    pairs = zip(draws_of(profiles_of(scenario, profile), count), profile.representatives(count))
    return [simulate_one(draw.scenario(scenario), trace, profile=drawn).result() for draw, drawn in pairs]


def intervals_of(
    run: Run,
    draws: Sequence[Mapping[str, Any]],
    profile: Profile,
    figures: Optional[Mapping[str, float]] = None,
) -> dict[str, Any]:
    """Return the key `intervals` of result.json; `draws` are the results of `simulate_draws`.

    `figures`: other values than the metrics of the run, which `draws` have too.
    """
    complete, metrics = [draw for draw in draws if not draw.get("stuck")], {}
    result = run.result() if figures is None else figures
    profiles = profiles_of(run.scenario, profile)
    spread = Spread.of(run, profiles)
    load = load_of(run, profile, spread.total)
    for name in metrics_in("intervals") if figures is None else figures:
        values = [draw[name] for draw in complete if draw.get(name) is not None]
        if result.get(name) is None or not 1 < len(values) == len(complete):
            continue
        own = spread.ttft if "ttft" in name.lower() else 0.0
        if name == "preemptions" and result[name]:
            own = result[name] ** -0.5  # a count of random events
        low, high = prediction_interval(result[name], values, CONFIDENCE, spread.wider, own)
        if not (load is not None and load.is_near and "ttft" in name.lower() and high > USELESS * low):
            metrics[name] = [low, high]
    return {
        "draws": len(draws),
        "stuck": len(draws) - len(complete),
        "confidence": CONFIDENCE,
        **spread.as_result(),
        "noise": have_noise(profiles),
        "load": None if load is None else load._asdict(),
        "metrics": metrics,
    }


def prediction_interval(
    value: float, draws: Sequence[float], confidence: float = CONFIDENCE, wider: float = 1.0, own: float = 0.0
) -> tuple[float, float]:
    """Return the limits between which another draw is expected, `wider` by a factor; they include the fitted value.

    `own`: a relative spread of the metric that the draws do not have. Normal on a logarithmic scale: times are
    positive, and near saturation they can grow more than shrink.
    """
    positive = min(draws) > 0
    values = [math.log(draw) for draw in draws] if positive else list(draws)
    centre, score = statistics.fmean(values), statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    half_width = math.hypot(wider * half_width_of_draws(values, confidence), score * own * (1 if positive else value))
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
    kind = "of step times" if intervals.get("ttft") else "between sessions"
    session = f"the spread {kind} ({100 * intervals['session']:.2g} %)"
    parts = [*(["the fit"] if intervals["fit"] else []), session, *(["noise of steps"] if intervals["noise"] else [])]
    texts = {
        "misfit": "its bias on held-out steps",
        "outside": "steps outside the measured range",
        "overlap": "the overlap of steps in flight",
        "ttft": "times of the front end and the client in TTFT",
    }
    parts += [f"{text} ({100 * intervals[key]:.2g} %)" for key, text in texts.items() if intervals.get(key)]
    lines = [f"intervals: {intervals['draws']} draws of the cost model; calibration uncertainty: {', '.join(parts)}"]
    if intervals.get("load"):
        lines.append(Load(**intervals["load"]).describe("mean_ttft_ms" in intervals["metrics"]))
    if not intervals["fit"]:
        lines.append(note("no uncertainty", profile=profile).text)
    if intervals["stuck"]:
        lines.append(f"the engine got stuck in {intervals['stuck']} of the draws; the intervals leave them out")
    return lines


def format_interval(metric: str, value: float, low: float, high: float) -> str:
    """Return `16.0 ms [14.8, 17.9]`, with two digits of the width."""
    unit = unit_of(metric, [value])
    value, low, high = (number / unit.divisor for number in (value, low, high))
    digits = digits_of(high - low)
    return f"{value:,.{digits}f} {unit.name}".strip() + f" [{low:,.{digits}f}, {high:,.{digits}f}]"
