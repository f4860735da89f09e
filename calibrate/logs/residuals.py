"""Simulate an observed run with trial costs, and compare its times in a queue, latencies, totals and reported figures.

Each kind has its own scale and its own step for derivatives.
Times in the log of a server with a queue are sums of step times, so errors add up along a run. There the residual is
the change of the error from one stretch of time to the next; longer stretches weigh less.
If the server has no queue, errors do not add up. There the residual is the error of the mean latencies of groups of
requests, by load and prompt length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from servesim.config.scenario import ColdStart
from servesim.core import StepCost
from servesim.costs.device_profile import Profile
from servesim.runs.metrics import Metrics
from servesim.runs.simulate import simulate

from .observed_runs import ObservedRun, Reported, relative_spread

Array = NDArray[np.float64]
MIN_REQUESTS = 100  # of a shortened run
Indices = NDArray[np.int64]
# Relative differences for derivatives. In a queue, 1e-7 changes scheduling decisions, which makes residuals jump; at
# 1e-10, rounding of times near one hour is a tenth of the effect of a small term. For means over many requests, changed
# decisions are part of the derivative. In means over a few requests they scatter: small terms need larger differences.
TIME_DIFFERENCES, MEAN_DIFFERENCES, GROUP_DIFFERENCES = (1e-8,), (0.1,), (0.1, 0.3, 0.9)
MAX_STRETCHES, MIN_EVENTS = 60, 10  # stretches per run, events per stretch
COARSE_STRETCHES = 6  # in the first solution: long stretches work far from the solution
MIN_RELATIVE_SPAN = 0.25  # of the mean span: shorter stretches get no more weight
RESOLUTION_S = 1e-3  # of times in logs
QUEUE_SHARE = 0.5  # of E2E: if the median request waits longer than this for its first token, there is a queue
LOAD_GROUPS, LENGTH_GROUPS, MIN_GROUP = 6, 5, 8  # groups of requests by load, then by prompt length; smallest size
LATENCY_SCALES = (0.05, 0.01)  # first guess of the scatter of mean TTFT and of mean decode time
MIN_LATENCY_SCALE = 1e-4
EXACT_RATIO = 1e-6


@dataclass(frozen=True)
class Prediction:
    """Simulated times of an observed run, in seconds since its first request was sent."""

    first: Array
    end: Array
    makespan: float
    metrics: Metrics
    reached: Mapping[str, float]  # sizes of the largest steps


def predict(
    run: ObservedRun,
    cost: StepCost,
    cold: tuple[float, float] = (0.0, 0.0),
    front_end: Mapping[str, float] = MappingProxyType({}),
) -> Prediction:
    """Simulate a run. A front end of its scenario replaces the one given here."""
    engine = run.scenario.engine.model_copy(update={"cold_start": ColdStart(prefill=cold[0], decode=cold[1])})
    scenario = run.scenario.model_copy(update={"engine": engine})
    done = simulate(scenario, run.trace, profile=Profile("fit", cost, {"front_end": front_end}))
    start = min(request.arrival for request in run.trace.requests)
    first, end = (done.measures.requests.column(name)[run.index] for name in ("first_token", "client_end"))
    return Prediction(first - start, end - start, done.measures.makespan, done.measures, done.reached)


def shortened(run: ObservedRun, requests: int) -> ObservedRun:
    """Return the first requests of a run with request times, without those that shared steps with later ones."""
    if not run.has_request_times or len(run.trace.requests) <= requests:
        return run
    first_later = run.first[run.index >= requests].min(initial=np.inf)
    kept = (run.index < requests) & (run.end <= first_later)
    if kept.sum() < MIN_REQUESTS:
        return run
    trace = replace(run.trace, requests=run.trace.requests[:requests])
    end = run.end[kept]
    return replace(run, trace=trace, index=run.index[kept], first=run.first[kept], end=end, makespan=float(end.max()))


class Residuals:
    """Errors of one run and their scale."""

    differences: Sequence[float] = TIME_DIFFERENCES  # of logarithms of parameters, for derivatives
    error_inflation = 1.6  # errors are correlated: on simulated logs, standard errors were too small by this factor
    resolution = RESOLUTION_S  # of the data: smaller errors are exact
    scale: Array  # standard deviation of each error, or of all

    def errors(self, predicted: Prediction) -> Array:
        """Return the errors of a prediction. Subclasses implement this."""
        raise NotImplementedError

    def exact(self, errors: Array) -> bool:
        """Return whether the errors are within the resolution of the data."""
        return float(np.abs(errors).max(initial=0.0)) <= self.resolution

    def refine(self) -> None:
        """Use the full resolution."""

    def reweigh(self, errors: Array) -> None:
        """Set the scale from the errors of a solution."""


class QueueTimes(Residuals):
    """The events of a run in time order, split into stretches of time."""

    def __init__(self, run: ObservedRun) -> None:
        self.times = np.concatenate([run.first, run.end])
        self.scale = np.array(0.003 * float(run.end.max()) / MAX_STRETCHES**0.5)
        self._split(COARSE_STRETCHES)

    def refine(self) -> None:
        self._split(MAX_STRETCHES)

    def _split(self, count: int) -> None:
        order = np.argsort(self.times, kind="stable")
        # Only the first token separates a cold start of the prefill from one of the decode.
        self.stretches = [order[:1], *split_by_time(order[1:], self.times, count)]
        spans = np.diff([0.0, *(float(np.median(self.times[events])) for events in self.stretches)])
        # Step times scatter independently: over four times the span, their sum scatters twice as much.
        relative = np.maximum(spans / max(float(spans.mean()), RESOLUTION_S), MIN_RELATIVE_SPAN)
        self.widths: Array = np.sqrt(relative)

    def errors(self, predicted: Prediction) -> Array:
        """Return the change of the error from each stretch to the next, scaled to equal spans."""
        error = np.concatenate([predicted.first, predicted.end]) - self.times
        error = np.where(np.isfinite(error), error, np.nanmax(np.abs(error), initial=1.0))  # unfinished when simulated
        return np.diff([0.0, *(float(np.median(error[events])) for events in self.stretches)]) / self.widths

    def reweigh(self, errors: Array) -> None:
        rest = errors[1:]  # the first one is the cold start
        self.scale = np.array(max(RESOLUTION_S, float(np.sqrt((rest @ rest) / max(1, len(rest) - 2)))))


def split_by_time(order: Indices, times: Array, max_stretches: int) -> list[Indices]:
    """Split events into stretches of equal time, each with enough events for a median.

    It starts at the end: only the last few events show the cost of a batch that is no longer full.
    """
    span = (times[order[-1]] - times[order[0]]) / max_stretches
    cuts, end = [], len(order)
    for start in range(len(order) - 1, MIN_EVENTS - 1, -1):
        if end - start >= MIN_EVENTS and times[order[end - 1]] - times[order[start]] >= span:
            cuts.append(start)
            end = start
    return np.split(order, cuts[::-1])


class RequestLatencies(Residuals):
    """Mean TTFT and mean decode time of groups of requests, as logarithms of predicted / measured."""

    differences = GROUP_DIFFERENCES
    error_inflation = 2.2  # requests that share steps are in different groups
    resolution = EXACT_RATIO

    def __init__(self, run: ObservedRun) -> None:
        self.sent = run.sent_times()
        self.ttft, self.decode = run.first - self.sent, run.end - run.first
        prompts = np.array([run.trace.requests[k].prompt for k in run.index], float)
        self.groups = latency_groups(open_requests(self.sent, run.end), prompts)
        self.scale = np.repeat(LATENCY_SCALES, len(self.groups))

    def errors(self, predicted: Prediction) -> Array:
        ttft, decode = predicted.first - self.sent, predicted.end - predicted.first
        return np.concatenate([self._ratios(ttft, self.ttft), self._ratios(decode, self.decode)])

    def _ratios(self, predicted: Array, measured: Array) -> Array:
        """Return the error of each group; requests that are unfinished when simulated make it infinite."""
        sums = [(float(predicted[group].sum()), float(measured[group].sum())) for group in self.groups]
        return np.array([np.log(max(ours, 1e-12) / theirs) if theirs > 0 else 0.0 for ours, theirs in sums])

    def reweigh(self, errors: Array) -> None:
        scatter = np.maximum(np.sqrt(np.mean(errors.reshape(2, -1) ** 2, axis=1)), MIN_LATENCY_SCALE)
        self.scale = np.repeat(scatter, len(self.groups))


def open_requests(sent: Array, end: Array) -> Array:
    """Return the mean number of open requests while each request is open."""
    times = np.sort(np.concatenate([sent, end]))
    count = np.searchsorted(np.sort(sent), times, "right") - np.searchsorted(np.sort(end), times, "right")
    area = np.concatenate([[0.0], np.cumsum(np.diff(times) * count[:-1])])  # request seconds up to each time
    before_start, before_end = np.interp(sent, times, area), np.interp(end, times, area)
    return np.asarray((before_end - before_start) / np.maximum(end - sent, 1e-9), float)


def latency_groups(load: Array, prompts: Array) -> list[Indices]:
    """Split requests into groups of similar load and prompt length."""
    groups = []
    for by_load in np.array_split(np.argsort(load, kind="stable"), max(1, min(LOAD_GROUPS, len(load) // MIN_GROUP))):
        parts = max(1, min(LENGTH_GROUPS, len(by_load) // MIN_GROUP))
        groups += np.array_split(by_load[np.argsort(prompts[by_load], kind="stable")], parts)
    return groups


class Total(Residuals):
    """A reported makespan."""

    def __init__(self, makespan: float, spread: float) -> None:
        self.makespan = makespan
        self.scale = np.array(spread * makespan)

    def errors(self, predicted: Prediction) -> Array:
        return np.array([predicted.makespan - self.makespan])


class ReportedFigures(Residuals):
    """Reported means and quantiles, as logarithms of predicted / measured."""

    differences = MEAN_DIFFERENCES
    resolution = EXACT_RATIO

    def __init__(self, reported: Sequence[Reported], spread: float) -> None:
        self.reported = reported
        self.scale = np.array([relative_spread(name, spread) for part in reported for name in part.figures])

    def errors(self, predicted: Prediction) -> Array:
        return np.array([
            np.log(max(ours, 1e-9) / theirs)
            for part in self.reported
            for theirs, ours in part.compare(predicted.metrics).values()
        ])  # fmt: skip


def residuals_of(run: ObservedRun, spread: float) -> list[Residuals]:
    """Return what the fit compares of a run."""
    parts: list[Residuals] = []
    if run.has_request_times:
        waiting = np.median((run.first - run.sent_times()) / np.maximum(run.end - run.sent_times(), RESOLUTION_S))
        queued = run.cold or waiting > QUEUE_SHARE
        parts.append(QueueTimes(run) if queued else RequestLatencies(run))
    elif run.makespan is not None:
        parts.append(Total(run.makespan, spread))
    return parts + ([ReportedFigures(run.reported, spread)] if run.reported else [])
