"""Step costs from logs of real runs, with no device at hand: the simulator runs inside the fit.

Instants in a log are sums of step times, so what is off adds up along a run: a residual is compared with the one
before it, window by window, and those differences are what the fit makes small. A run's own scatter says how much its
differences weigh, and those over a longer time weigh less; a reported total weighs as `Runs.spread` says. Every
parameter comes with an interval: the wider of what the residuals say and what leaving out one run after another says.
The intervals hold for servers that had a queue; where one idles between requests, every scheduling decision hangs on a
hair, and the fit may end beside the best one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.config.scenario import ColdStart
from servesim.core import StepCost
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import simulate

from .least_squares import Solution, beyond, scaled, solve
from .observed_runs import Observed, Runs, value_of, with_values
from .segments import COARSE, FINEST, WINDOWS, Windows

Array = NDArray[np.float64]
Told = Callable[[str], None]
Moved = tuple[list[str], Solution]  # parameters found without one of the runs

SEARCHES = 2  # times that better points are looked for around a solution
REWEIGHTS = 3  # times the runs' weights are taken from their own scatter
COLD = 10.0  # seconds that compiling may take, to begin with
LEAST = 1e-9  # seconds: a parameter that starts at 0 could never move
UNDERSTATED = 1.6  # residuals lean on each other: errors from logs that the simulator wrote were too small by this
SOLE = 3.0  # times as uncertain without a run: that run alone tells of the parameter
INTERVAL = 2.6  # standard errors either way: 99 of 100


@dataclass(frozen=True)
class Predicted:
    """What the simulator says of an observed run."""

    first: Array
    end: Array
    makespan: float


@dataclass(frozen=True)
class Judged:
    """How far a prediction is off, as parts of what was measured."""

    name: str
    measured: float  # makespan, seconds
    predicted: float
    ttft: Optional[float] = None  # median over requests
    e2e: Optional[float] = None

    @property
    def error(self) -> float:
        """The makespan's error."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class LogFit:
    """Fitted costs, how certain they are, and how well they do."""

    names: list[str]
    values: Array
    errors: Array  # standard errors, as parts of the values
    cost: StepCost
    cold: dict[str, tuple[float, float]]  # by run: seconds that its first prefill and decode took longer
    scatter: dict[str, float]  # by run: seconds, of the differences between windows
    fitted: list[Judged]
    left_out: list[Judged]  # each run predicted from the others
    predicted: list[Judged]  # runs that the fit never saw
    notes: list[str] = field(default_factory=list)

    def interval(self, k: int) -> tuple[float, float]:
        """Return the bounds of a parameter."""
        reach = float(np.exp(INTERVAL * min(self.errors[k], 10.0)))
        return float(self.values[k]) / reach, float(self.values[k]) * reach


def predict(run: Observed, cost: StepCost, cold: tuple[float, float] = (0.0, 0.0)) -> Predicted:
    """Simulate a run."""
    engine = run.scenario.engine.model_copy(update={"cold_start": ColdStart(prefill=cold[0], decode=cold[1])})
    scenario = run.scenario.model_copy(update={"engine": engine})
    done = simulate(scenario, run.trace, profile=Profile("fit", cost))
    start = min(request.arrival for request in run.trace.requests)
    first = np.array([request.first_token for request in done.requests], float)[run.index]
    end = np.array([request.seen for request in done.requests], float)[run.index]
    return Predicted(first - start, end - start, done.measures.makespan)


class Problem:
    """Residuals of the runs to fit, as a function of the parameters."""

    def __init__(self, runs: Sequence[Observed], cost: StepCost, free: Mapping[str, float], spread: float) -> None:
        self.runs = list(runs)
        self.start_cost = cost
        self.free = list(free)
        self.priors = dict(free)
        self.spread = spread
        self.windows = {run.name: Windows(run, COARSE) for run in runs if run.detailed}
        self.scatter = {name: 0.003 * self._run(name).makespan / WINDOWS**0.5 for name in self.windows}
        self.names = self.free + [
            f"cold.{run.name}.{kind}" for run in runs if run.cold for kind in ("prefill", "decode")
        ]
        self._known: dict[tuple[object, ...], Array] = {}

    def _run(self, name: str) -> Observed:
        return next(run for run in self.runs if run.name == name)

    def start(self) -> Array:
        """Return the parameters to begin with."""
        values = [value_of(self.start_cost, name) for name in self.free]
        for run in self.runs:
            if run.cold:
                values += [max(1.0, float(run.first.min()) - 0.5) if run.detailed else COLD, COLD]
        return np.asarray(np.maximum(np.array(values), LEAST), float)

    def width(self) -> Array:
        """Return how far a parameter may be from its start, as a part of it."""
        return np.array([self.priors.get(name, 1.0) for name in self.names])

    def cost(self, values: Array) -> StepCost:
        """Return the cost model with these parameters."""
        return with_values(self.start_cost, self.free, [float(value) for value in values[: len(self.free)]])

    def cold(self, values: Array) -> dict[str, tuple[float, float]]:
        """Return the cold start of every run that had one."""
        found = dict(zip(self.names, (float(value) for value in values)))
        return {
            run.name: (found[f"cold.{run.name}.prefill"], found[f"cold.{run.name}.decode"])
            for run in self.runs
            if run.cold
        }

    def residuals(self, values: Array) -> Array:
        """Return what is off, in standard deviations."""
        return np.concatenate([self._off(run, values) / self._scale(run) for run in self.runs])

    def squares(self, values: Array, limit: float = np.inf) -> float:
        """Return the sum of the residuals' squares, or what the first runs make of it where that is above the limit."""
        found = 0.0
        for run in self.runs:
            off = self._off(run, values) / self._scale(run)
            found += float(off @ off)
            if found > limit:
                break
        return found

    def exact(self, values: Array) -> bool:
        """Say whether all that was seen is explained, as closely as a log can tell."""
        return all(float(np.abs(self._off(run, values)).max()) <= FINEST for run in self.runs)

    def _scale(self, run: Observed) -> float:
        return self.scatter[run.name] if run.detailed else self.spread * run.makespan

    def _off(self, run: Observed, values: Array) -> Array:
        """Return what is off of a run, in seconds."""
        cold = self.cold(values).get(run.name, (0.0, 0.0))
        key = (run.name, *cold, *(float(value) for value in values[: len(self.free)]))
        if key not in self._known:  # a cold start of one run does not touch the others
            predicted = predict(run, self.cost(values), cold)
            if run.detailed:
                self._known[key] = self.windows[run.name].differences(predicted.first, predicted.end)
            else:
                self._known[key] = np.array([predicted.makespan - run.makespan])
        return self._known[key]

    def refine(self) -> None:
        """Look at runs as closely as they allow."""
        self.windows = {run.name: Windows(run) for run in self.runs if run.detailed}
        self._known.clear()

    def reweigh(self, values: Array) -> None:
        """Let every run's scatter say what its differences weigh."""
        for run in self.runs:
            if run.detailed:
                rest = self._off(run, values)[1:]  # the first difference is the cold start's
                self.scatter[run.name] = max(FINEST, float(np.sqrt((rest @ rest) / max(1, len(rest) - 2))))


def fit_logs(given: Runs, told: Told = lambda line: None, leave_out: bool = True) -> LogFit:
    """Fit the free parameters to the runs that are to be fitted, and judge all runs."""
    training = [run for run in given.runs if run.fit]
    problem = Problem(training, given.cost, given.free, given.spread)
    solution = settled(problem, told)
    cost, cold = problem.cost(solution.x), problem.cold(solution.x)
    errors = UNDERSTATED * solution.errors
    left_out: list[Judged] = []
    if leave_out and len(training) > 1:
        moved, left_out = without_each(problem, solution, told)
        errors = np.maximum(errors, jackknife(moved, problem.names, solution))
    others = [run for run in given.runs if not run.fit]
    judged = [[judge(run, cost, cold) for run in group] for group in (training, others)]
    return LogFit(problem.names, solution.x, errors, cost, cold, dict(problem.scatter), judged[0], left_out, judged[1])


def settled(problem: Problem, told: Told) -> Solution:
    """Solve, take the weights from what is left, and solve again."""
    start = problem.start()
    prompts = [k for k, name in enumerate(problem.free) if name.startswith("prefill")]
    others = [k for k in range(len(problem.free)) if k not in prompts]
    x, width = scaled(problem.squares, start, ([*prompts, *others], prompts, others)), problem.width()
    for turn in range(REWEIGHTS + 1):
        if turn == 1:
            problem.refine()
        if turn:
            problem.reweigh(x)

        def tell(done: int, left: float, turn: int = turn) -> None:
            told(f"fit {turn + 1} of {REWEIGHTS + 1}, round {done}: sum of squares {left:.1f}")

        solution = solve(problem.residuals, x, start, width, told=tell)
        for seed in range(SEARCHES if turn < REWEIGHTS else 0):
            if problem.exact(solution.x):
                break
            moved = beyond(problem.squares, solution, seed)
            if moved is solution.x:
                break
            solution = solve(problem.residuals, moved, start, width, told=tell)
        x = solution.x
    return solution


def without_each(problem: Problem, solution: Solution, told: Told) -> tuple[list[Moved], list[Judged]]:
    """Fit without one run after another; return the parameters each time, and how the left-out run is predicted."""
    moved, judged = [], []
    whole = dict(zip(problem.names, solution.x))
    for run in problem.runs:
        told(f"without {run.name}")
        rest = Problem([r for r in problem.runs if r is not run], problem.start_cost, problem.priors, problem.spread)
        rest.refine()
        rest.scatter = {name: problem.scatter[name] for name in rest.windows}
        begin = np.array([whole[name] for name in rest.names])
        again = solve(rest.residuals, begin, rest.start(), rest.width(), rounds=4)
        moved.append((rest.names, again))
        # How long its first calls compiled cannot be known from other runs: that much is taken from the whole fit.
        judged.append(judge(run, rest.cost(again.x), problem.cold(solution.x)))
    return moved, judged


def jackknife(moved: Sequence[Moved], names: Sequence[str], found: Solution) -> Array:
    """Return the standard errors, as parts, that leaving out one run at a time says.

    A run without which a parameter is hardly known at all says nothing about it by being left out.
    """
    squares = np.zeros(len(names))
    for rest, again in moved:
        for k, name in enumerate(names):
            if name in rest:
                place = rest.index(name)
                if again.errors[place] <= SOLE * found.errors[k]:
                    squares[k] += np.log(again.x[place] / found.x[k]) ** 2
    return np.asarray(np.sqrt((len(moved) - 1) / len(moved) * squares), float)


def judge(run: Observed, cost: StepCost, cold: Mapping[str, tuple[float, float]]) -> Judged:
    """Say how far a run's prediction is off."""
    predicted = predict(run, cost, cold.get(run.name, (0.0, 0.0)))
    if not run.detailed:
        return Judged(run.name, run.makespan, predicted.makespan)
    start = min(request.arrival for request in run.trace.requests)
    sent = np.array([run.trace.requests[k].arrival for k in run.index]) - start
    ttft = np.abs(predicted.first - run.first) / (run.first - sent)
    e2e = np.abs(predicted.end - run.end) / (run.end - sent)
    return Judged(run.name, run.makespan, predicted.makespan, float(np.nanmedian(ttft)), float(np.nanmedian(e2e)))
