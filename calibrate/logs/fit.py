"""Fit step costs to logs of real runs, without a device: the simulator runs inside the fit.

The fit minimises the residuals of all runs (residuals.py). The weight of a log comes from the scatter of its residuals.
The interval of a parameter is the wider one of two: from the residuals, and from leaving out one run at a time.
Long logs are fitted in two steps: the first requests of each run, then all of them, starting from that solution.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import StepCost

from .least_squares import Solution, scan_scales, search_nearby, solve
from .observed_runs import ObservedRun, Runs
from .parameters import front_end_key
from .problem import Problem
from .residuals import Prediction, QueueTimes, predict, shortened

Array = NDArray[np.float64]
Progress = Callable[[str], None]
PartialFit = tuple[list[str], Solution]  # parameter names and solution without one of the runs

SEARCHES = 2  # searches for a better point around a solution
REWEIGHTS = 3  # solutions with weights from the residuals before
SHORT_LOG = 2000  # requests of all runs: more are fitted in two steps
SHORT_RUN = 400  # requests of each run in the first of these two steps, at least
LAST_ROUNDS = 3  # of the second step
PARTIAL_ROUNDS, LONG_PARTIAL_ROUNDS = 4, 2  # of a fit that leaves out one run; of long logs
DRAWS, MAX_SCORE = 24, 2.5  # stored random cost models; standard errors by which their parameters may differ
SOLE_SOURCE_RATIO = 3.0  # a parameter this much more uncertain without a run is determined by that run alone
SHOWN = 0.7  # standard error over the width of the prior: above it, the value is that of the prior
ALIKE, SAME = 0.5, 0.9  # correlations of two parameters: a larger one absorbs the other; only their sum is known
GRID = ("prefill_tokens", "decode_rows", "context_per_row")  # sizes of the measured range: up to the largest steps
INTERVAL_ERRORS = 2.6  # standard errors on either side: a 99 % interval


@dataclass(frozen=True)
class RunError:
    """Error of a predicted run; latency errors are relative to the measured values."""

    name: str
    measured: Optional[float]  # makespan, seconds; None if it is not known
    predicted: float
    ttft: Optional[float] = None  # median absolute error over requests
    e2e: Optional[float] = None  # the same
    figures: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # reported: measured, predicted; ms

    @property
    def error(self) -> Optional[float]:
        """The signed error of the makespan."""
        return None if self.measured is None else self.predicted / self.measured - 1


@dataclass(frozen=True)
class LogFit:
    """Fitted costs, their uncertainty, and their errors."""

    names: list[str]
    values: Array
    errors: Array  # relative standard errors
    cost: StepCost
    draws: list[StepCost]  # equally likely cost models, from the joint uncertainty of the parameters
    cold: dict[str, tuple[float, float]]  # by run: cold start of prefill and decode in seconds
    front_end: dict[str, float]  # by key of `engine.front_end`
    front_end_findings: list[str]  # whether the data show its times, one line each
    fitted: list[RunError]
    left_out: list[RunError]  # each run predicted by a fit to the others
    predicted: list[RunError]  # runs that the fit did not use
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)  # sizes of the steps of the fitted runs

    def interval(self, k: int) -> tuple[float, float]:
        """Return the confidence interval of a parameter."""
        factor = float(np.exp(INTERVAL_ERRORS * min(self.errors[k], 10.0)))
        return float(self.values[k]) / factor, float(self.values[k]) * factor


def fit_logs(spec: Runs, progress: Progress = lambda line: None, leave_out: bool = True) -> LogFit:
    """Fit the free parameters to the runs with `fit: true`; return the errors of all runs."""
    problem = Problem(replace(spec, runs=[run for run in spec.runs if run.fit]))
    solution = solve_problem(problem, progress)
    errors = problem.error_inflation * solution.errors
    left_out: list[RunError] = []
    if leave_out and len(problem.runs) > 1:
        partial_fits, left_out = leave_one_out(problem, solution, progress)
        errors = np.maximum(errors, jackknife(partial_fits, problem.names, solution))
    draws = [problem.cost(values) for values in random_parameters(solution, np.minimum(errors, problem.width()))]
    runs = [(run, problem.predict(run, solution.x)) for run in spec.runs]
    fitted, predicted = ([run_error(*pair) for pair in runs if pair[0].fit == fit] for fit in (True, False))
    found = [
        front_end_finding(problem, solution, errors, k) for k, name in enumerate(problem.free) if front_end_key(name)
    ]
    reached = [prediction.reached for run, prediction in runs if run.fit]
    grid = {name: [1.0, max(size, 1.0)] for name in GRID if (size := max(sizes[name] for sizes in reached))}
    cost, cold, front_end = problem.cost(solution.x), problem.cold(solution.x), problem.front_end(solution.x)
    return LogFit(
        problem.names, solution.x, errors, cost, draws, cold, front_end, found, fitted, left_out, predicted, grid
    )


def front_end_finding(problem: Problem, solution: Solution, errors: Array, k: int) -> str:
    """Return whether the data show a time of the front end, or cannot tell it from another parameter."""
    name, width = problem.names[k], float(problem.width()[k])
    correlations = solution.covariance[k] / (solution.errors * solution.errors[k])
    others = [(abs(float(value)), other) for other, value in zip(problem.names, correlations) if other != name]
    alike, other = max(others, default=(0.0, ""))
    if float(errors[k]) > SHOWN * width:
        reason = f"cannot be separated from {other}" if alike > ALIKE else "not shown by the data"
        return f"{name}: {reason}: it is the prior"
    if alike > SAME:
        return f"{name}: its sum with {other} is better known than each (correlation {alike:.2f})"
    return f"{name}: measured, apart from the step times"


def random_parameters(solution: Solution, errors: Array) -> Array:
    """Return parameters with these relative errors and the correlations of the solution; always the same ones."""
    correlations = solution.covariance / np.outer(solution.errors, solution.errors)
    scores = np.random.default_rng(0).multivariate_normal(np.zeros(len(errors)), correlations, DRAWS)
    return np.asarray(solution.x * np.exp(np.clip(scores, -MAX_SCORE, MAX_SCORE) * errors), float)


def solve_problem(problem: Problem, progress: Progress) -> Solution:
    """Solve a problem; long logs first with the first requests of each run."""
    short = [shortened(run, max(SHORT_RUN, SHORT_LOG // (2 * len(problem.runs)))) for run in problem.runs]
    if problem.request_count <= SHORT_LOG or all(map(operator.is_, short, problem.runs)):
        return solve_reweighted(problem, progress)
    x = solve_reweighted(Problem(replace(problem.spec, runs=short)), progress).x
    problem.refine()
    problem.reweigh(x)

    def report(done: int, squares: float) -> None:
        progress(f"all requests, round {done}: sum of squares {squares:.1f}")

    x = solve(problem, x, LAST_ROUNDS, report).x
    problem.reweigh(x)
    return solve(problem, x, LAST_ROUNDS, report)


def solve_reweighted(problem: Problem, progress: Progress) -> Solution:
    """Solve, set the weights from the residuals, and solve again."""
    prefill = [k for k, name in enumerate(problem.free) if name.startswith("prefill")]
    others = [k for k in range(len(problem.free)) if k not in prefill]
    x = scan_scales(problem.squares, problem.start(), ([*prefill, *others], prefill, others))
    reweights = REWEIGHTS if any(run.has_request_times for run in problem.runs) else 0  # their scatter gives weights
    parts = [part for parts in problem.parts.values() for part in parts]
    searches = SEARCHES if any(isinstance(part, QueueTimes) for part in parts) else 0  # decisions make local minima
    for number in range(reweights + 1):
        if number == 1:
            problem.refine()
        if number:
            problem.reweigh(x)

        def report(done: int, squares: float, number: int = number) -> None:
            progress(f"fit {number + 1} of {reweights + 1}, round {done}: sum of squares {squares:.1f}")

        solution = solve(problem, x, progress=report)
        for seed in range(searches if number < reweights else 0):
            if problem.exact(solution.x):
                break
            better = search_nearby(problem.squares, solution, seed)
            if better is solution.x:
                break
            solution = solve(problem, better, progress=report)
        x = solution.x
    return solution


def leave_one_out(problem: Problem, solution: Solution, progress: Progress) -> tuple[list[PartialFit], list[RunError]]:
    """Fit without each run in turn; return the solutions, and the error of each left-out run."""
    partial_fits, errors = [], []
    values = dict(zip(problem.names, solution.x))
    rounds = PARTIAL_ROUNDS if problem.request_count <= SHORT_LOG else LONG_PARTIAL_ROUNDS
    for run in problem.runs:
        progress(f"without {run.name}")
        rest = problem.without(run)
        partial = solve(rest, np.array([values[name] for name in rest.names]), rounds)
        partial_fits.append((rest.names, partial))
        # Other runs do not show the cold start of this run, so it is taken from the full fit.
        cold = problem.cold(solution.x).get(run.name, (0.0, 0.0))
        errors.append(run_error(run, predict(run, rest.cost(partial.x), cold, rest.front_end(partial.x))))
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


def run_error(run: ObservedRun, predicted: Prediction) -> RunError:
    """Return the error of a predicted run."""
    figures = {
        f"{part.name} {name}".strip(): pair
        for part in run.reported
        for name, pair in part.compare(predicted.metrics).items()
    }
    if not run.has_request_times:
        return RunError(run.name, run.makespan, predicted.makespan, figures=figures)
    sent = run.sent_times()
    ttft = np.abs(predicted.first - run.first) / (run.first - sent)
    e2e = np.abs(predicted.end - run.end) / (run.end - sent)
    return RunError(run.name, run.makespan, predicted.makespan, known_median(ttft), known_median(e2e), figures)


def known_median(errors: Array) -> float:
    """Return the median without NaN; NaN if no request has a predicted time."""
    known = errors[~np.isnan(errors)]
    return float(np.median(known) if len(known) else np.nan)
