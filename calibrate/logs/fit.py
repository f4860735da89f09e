"""Fit step costs to logs of real runs, without a device: the simulator runs inside the fit.

Times in a log are sums of step times, so errors add up along a run. The fit therefore minimises the change of the
residual from one stretch of time to the next. The weight of a change comes from the scatter of its run; longer
stretches weigh less. The weight of a reported total comes from `Runs.spread`.
The interval of a parameter is the wider one of two: from the residuals, and from leaving out one run at a time.
Intervals hold for servers with a queue. If the server idles between requests, small differences change the schedule,
and the fit can miss the best solution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.config.scenario import ColdStart
from servesim.core import StepCost
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import simulate

from .least_squares import Solution, known_median, scan_scales, search_nearby, solve
from .observed_runs import ObservedRun, Runs, value_of, with_values

Array = NDArray[np.float64]
Progress = Callable[[str], None]
PartialFit = tuple[list[str], Solution]  # parameter names and solution without one of the runs

SEARCHES = 2  # searches for a better point around a solution
REWEIGHTS = 3  # solutions with weights from the residuals before
COLD_START_S = 10.0  # start value
MIN_START = 1e-9  # seconds: the solver works on logarithms, so no start value can be 0
ERROR_INFLATION = 1.6  # residuals are correlated: on simulated logs, standard errors were too small by this factor
SOLE_SOURCE_RATIO = 3.0  # a parameter this much more uncertain without a run is determined by that run alone
INTERVAL_ERRORS = 2.6  # standard errors on either side: a 99 % interval
MAX_STRETCHES, MIN_EVENTS = 60, 10  # stretches per run, events per stretch
COARSE_STRETCHES = 6  # in the first solution: long stretches work far from the solution
MIN_RELATIVE_SPAN = 0.25  # of the mean span: shorter stretches get no more weight
RESOLUTION_S = 1e-3  # of times in logs


@dataclass(frozen=True)
class Prediction:
    """Simulated times of an observed run."""

    first: Array
    end: Array
    makespan: float


@dataclass(frozen=True)
class RunError:
    """Error of a predicted run; latency errors are relative to the measured values."""

    name: str
    measured: float  # makespan, seconds
    predicted: float
    ttft: Optional[float] = None  # median absolute error over requests
    e2e: Optional[float] = None  # the same

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class LogFit:
    """Fitted costs, their uncertainty, and their errors."""

    names: list[str]
    values: Array
    errors: Array  # relative standard errors
    cost: StepCost
    cold: dict[str, tuple[float, float]]  # by run: cold start of prefill and decode in seconds
    fitted: list[RunError]
    left_out: list[RunError]  # each run predicted by a fit to the others
    predicted: list[RunError]  # runs that the fit did not use

    def interval(self, k: int) -> tuple[float, float]:
        """Return the confidence interval of a parameter."""
        factor = float(np.exp(INTERVAL_ERRORS * min(self.errors[k], 10.0)))
        return float(self.values[k]) / factor, float(self.values[k]) * factor


def predict(run: ObservedRun, cost: StepCost, cold: tuple[float, float] = (0.0, 0.0)) -> Prediction:
    """Simulate a run."""
    engine = run.scenario.engine.model_copy(update={"cold_start": ColdStart(prefill=cold[0], decode=cold[1])})
    scenario = run.scenario.model_copy(update={"engine": engine})
    done = simulate(scenario, run.trace, profile=Profile("fit", cost))
    start = min(request.arrival for request in run.trace.requests)
    first = np.array([request.first_token for request in done.requests], float)[run.index]
    end = np.array([request.client_end for request in done.requests], float)[run.index]
    return Prediction(first - start, end - start, done.measures.makespan)


def split_by_time(order: NDArray[np.int64], times: Array, max_stretches: int) -> list[NDArray[np.int64]]:
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


class Stretches:
    """The events of a run in time order, split into stretches of time."""

    def __init__(self, run: ObservedRun, max_stretches: int = MAX_STRETCHES) -> None:
        self.times = np.concatenate([run.first, run.end])
        order = np.argsort(self.times, kind="stable")
        # Only the first token separates a cold start of the prefill from one of the decode.
        self.stretches = [order[:1], *split_by_time(order[1:], self.times, max_stretches)]
        spans = np.diff([0.0, *(float(np.median(self.times[events])) for events in self.stretches)])
        # Step times scatter independently: over four times the span, their sum scatters twice as much.
        relative = np.maximum(spans / max(float(spans.mean()), RESOLUTION_S), MIN_RELATIVE_SPAN)
        self.widths: Array = np.sqrt(relative)

    def residual_changes(self, first: Array, end: Array) -> Array:
        """Return the change of the residual from each stretch to the next, scaled to equal spans."""
        error = np.concatenate([first, end]) - self.times
        error = np.where(np.isfinite(error), error, np.nanmax(np.abs(error), initial=1.0))  # unfinished when simulated
        return np.diff([0.0, *(float(np.median(error[events])) for events in self.stretches)]) / self.widths


class Problem:
    """Residuals of the fitted runs as a function of the parameters."""

    def __init__(self, runs: Sequence[ObservedRun], cost: StepCost, free: Mapping[str, float], spread: float) -> None:
        self.runs = list(runs)
        self.start_cost = cost
        self.free = list(free)
        self.priors = free
        self.spread = spread
        self.stretches = {run.name: Stretches(run, COARSE_STRETCHES) for run in runs if run.has_request_times}
        self.scatter = {run.name: 0.003 * run.makespan / MAX_STRETCHES**0.5 for run in runs if run.has_request_times}
        self.names = self.free + [
            f"cold.{run.name}.{kind}" for run in runs if run.cold for kind in ("prefill", "decode")
        ]
        self._cache: dict[tuple[object, ...], Array] = {}

    def start(self) -> Array:
        """Return the start values of the parameters."""
        values = [value_of(self.start_cost, name) for name in self.free]
        for run in self.runs:
            if run.cold:
                first = max(1.0, float(run.first.min()) - 0.5) if run.has_request_times else COLD_START_S
                values += [first, COLD_START_S]
        return np.asarray(np.maximum(np.array(values), MIN_START), float)

    def width(self) -> Array:
        """Return the relative widths of the priors."""
        return np.array([self.priors.get(name, 1.0) for name in self.names])

    def cost(self, values: Array) -> StepCost:
        """Return the cost model with these parameters."""
        return with_values(self.start_cost, self.free, [float(value) for value in values[: len(self.free)]])

    def cold(self, values: Array) -> dict[str, tuple[float, float]]:
        """Return the cold start of every run that has one."""
        seconds = iter([float(value) for value in values[len(self.free) :]])
        return {run.name: (next(seconds), next(seconds)) for run in self.runs if run.cold}

    def residuals(self, values: Array) -> Array:
        """Return the residuals in standard deviations."""
        return np.concatenate([self._errors(run, values) / self._scale(run) for run in self.runs])

    def squares(self, values: Array, limit: float = np.inf) -> float:
        """Return the sum of squared residuals. It stops at the first run after which the sum is above the limit."""
        total = 0.0
        for run in self.runs:
            errors = self._errors(run, values) / self._scale(run)
            total += float(errors @ errors)
            if total > limit:
                break
        return total

    def exact(self, values: Array) -> bool:
        """Return whether all residuals are within the resolution of a log."""
        return all(float(np.abs(self._errors(run, values)).max()) <= RESOLUTION_S for run in self.runs)

    def _scale(self, run: ObservedRun) -> float:
        return self.scatter[run.name] if run.has_request_times else self.spread * run.makespan

    def _errors(self, run: ObservedRun, values: Array) -> Array:
        """Return the errors of a run in seconds."""
        cold = self.cold(values).get(run.name, (0.0, 0.0))
        key = (run.name, *cold, *(float(value) for value in values[: len(self.free)]))
        if key not in self._cache:  # a cold start of one run does not change the others
            predicted = predict(run, self.cost(values), cold)
            if run.has_request_times:
                self._cache[key] = self.stretches[run.name].residual_changes(predicted.first, predicted.end)
            else:
                self._cache[key] = np.array([predicted.makespan - run.makespan])
        return self._cache[key]

    def refine(self) -> None:
        """Use the shortest possible stretches."""
        self.stretches = {run.name: Stretches(run) for run in self.runs if run.has_request_times}
        self._cache.clear()

    def reweigh(self, values: Array) -> None:
        """Set the weight of every run from the scatter of its residuals."""
        for run in self.runs:
            if run.has_request_times:
                errors = self._errors(run, values)[1:]  # the first one is the cold start
                self.scatter[run.name] = max(RESOLUTION_S, float(np.sqrt((errors @ errors) / max(1, len(errors) - 2))))


def fit_logs(spec: Runs, progress: Progress = lambda line: None, leave_out: bool = True) -> LogFit:
    """Fit the free parameters to the runs with `fit: true`; return the errors of all runs."""
    training = [run for run in spec.runs if run.fit]
    problem = Problem(training, spec.cost, spec.free, spec.spread)
    solution = solve_reweighted(problem, progress)
    cost, cold = problem.cost(solution.x), problem.cold(solution.x)
    errors = ERROR_INFLATION * solution.errors
    left_out: list[RunError] = []
    if leave_out and len(training) > 1:
        partial_fits, left_out = leave_one_out(problem, solution, progress)
        errors = np.maximum(errors, jackknife(partial_fits, problem.names, solution))
    others = [run for run in spec.runs if not run.fit]
    fitted, predicted = ([run_error(run, cost, cold) for run in group] for group in (training, others))
    return LogFit(problem.names, solution.x, errors, cost, cold, fitted, left_out, predicted)


def solve_reweighted(problem: Problem, progress: Progress) -> Solution:
    """Solve, set the weights from the residuals, and solve again."""
    start = problem.start()
    prefill = [k for k, name in enumerate(problem.free) if name.startswith("prefill")]
    others = [k for k in range(len(problem.free)) if k not in prefill]
    x, width = scan_scales(problem.squares, start, ([*prefill, *others], prefill, others)), problem.width()
    for number in range(REWEIGHTS + 1):
        if number == 1:
            problem.refine()
        if number:
            problem.reweigh(x)

        def report(done: int, squares: float, number: int = number) -> None:
            progress(f"fit {number + 1} of {REWEIGHTS + 1}, round {done}: sum of squares {squares:.1f}")

        solution = solve(problem.residuals, x, start, width, progress=report)
        for seed in range(SEARCHES if number < REWEIGHTS else 0):
            if problem.exact(solution.x):
                break
            better = search_nearby(problem.squares, solution, seed)
            if better is solution.x:
                break
            solution = solve(problem.residuals, better, start, width, progress=report)
        x = solution.x
    return solution


def leave_one_out(problem: Problem, solution: Solution, progress: Progress) -> tuple[list[PartialFit], list[RunError]]:
    """Fit without each run in turn; return the solutions, and the error of each left-out run."""
    partial_fits, errors = [], []
    values = dict(zip(problem.names, solution.x))
    for run in problem.runs:
        progress(f"without {run.name}")
        rest = Problem([r for r in problem.runs if r is not run], problem.start_cost, problem.priors, problem.spread)
        rest.refine()
        rest.scatter = {name: problem.scatter[name] for name in rest.stretches}
        start = np.array([values[name] for name in rest.names])
        partial = solve(rest.residuals, start, rest.start(), rest.width(), rounds=4)
        partial_fits.append((rest.names, partial))
        # Other runs do not show the cold start of this run, so it is taken from the full fit.
        errors.append(run_error(run, rest.cost(partial.x), problem.cold(solution.x)))
    return partial_fits, errors


def jackknife(partial_fits: Sequence[PartialFit], names: Sequence[str], full: Solution) -> Array:
    """Return relative standard errors from the solutions that leave out one run each.

    Without its sole source, a parameter only returns to its prior; such a solution is not used for that parameter.
    """
    squares = np.zeros(len(names))
    for partial_names, partial in partial_fits:
        for k, name in enumerate(names):
            if name in partial_names:
                index = partial_names.index(name)
                if partial.errors[index] <= SOLE_SOURCE_RATIO * full.errors[k]:
                    squares[k] += np.log(partial.x[index] / full.x[k]) ** 2
    return np.asarray(np.sqrt((len(partial_fits) - 1) / len(partial_fits) * squares), float)


def run_error(run: ObservedRun, cost: StepCost, cold: Mapping[str, tuple[float, float]]) -> RunError:
    """Predict a run and return its error."""
    predicted = predict(run, cost, cold.get(run.name, (0.0, 0.0)))
    if not run.has_request_times:
        return RunError(run.name, run.makespan, predicted.makespan)
    start = min(request.arrival for request in run.trace.requests)
    sent = np.array([run.trace.requests[k].arrival for k in run.index]) - start
    ttft = np.abs(predicted.first - run.first) / (run.first - sent)
    e2e = np.abs(predicted.end - run.end) / (run.end - sent)
    return RunError(run.name, run.makespan, predicted.makespan, known_median(ttft), known_median(e2e))
