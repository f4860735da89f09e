"""Step costs from logs of real runs, with no device at hand: the simulator runs inside the fit.

Instants in a log are sums of step times, so errors add up along a run: the fit makes small how much a window's residual
differs from the one before it. A run's own scatter says how much its differences weigh, those over a longer time weigh
less, and a reported total weighs as `Runs.spread` says. A parameter's interval is the wider of what the residuals say
and what leaving out one run after another says. It holds for servers that had a queue; if the server idles between
requests, small differences change the scheduling, and the fit may miss the best one.
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

from .least_squares import Solution, beyond, scaled, solve
from .observed_runs import Observed, Runs, value_of, with_values

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
WINDOWS, EVENTS = 60, 10  # windows of a run at most, and events of one at least
COARSE = 6  # windows to begin with: long ones show where to go from far away
SHORTEST = 0.25  # of the mean span between windows: shorter ones are no more certain
FINEST = 1e-3  # seconds: no log is more exact


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
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class LogFit:
    """Fitted costs, how certain they are, and how well they do."""

    names: list[str]
    values: Array
    errors: Array  # standard errors, as parts of the values
    cost: StepCost
    cold: dict[str, tuple[float, float]]  # by run: seconds that its first prefill and decode took longer
    fitted: list[Judged]
    left_out: list[Judged]  # each run predicted from the others
    predicted: list[Judged]  # runs that the fit never saw

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


def stretches(order: NDArray[np.int64], seen: Array, most: int) -> list[NDArray[np.int64]]:
    """Cut events into at most this many stretches of the same time, each with enough events for a median.

    From the end on: what a batch costs that is no longer full is seen in the last few events alone.
    """
    whole = (seen[order[-1]] - seen[order[0]]) / most
    cuts, end = [], len(order)
    for place in range(len(order) - 1, EVENTS - 1, -1):
        if end - place >= EVENTS and seen[order[end - 1]] - seen[order[place]] >= whole:
            cuts.append(place)
            end = place
    return np.split(order, cuts[::-1])


class Windows:
    """The events of a run in the order they were seen, cut into stretches that are compared as one."""

    def __init__(self, run: Observed, most: int = WINDOWS) -> None:
        self.seen = np.concatenate([run.first, run.end])
        order = np.argsort(self.seen, kind="stable")
        # The first token alone tells the first prefill from the first decode where both compiled.
        self.parts = [order[:1], *stretches(order[1:], self.seen, most)]
        spans = np.diff([0.0, *(float(np.median(self.seen[part])) for part in self.parts)])
        # Step times scatter each by itself: over a span four times as long their sum scatters twice as much.
        self.widths: Array = np.sqrt(np.maximum(spans / max(float(spans.mean()), FINEST), SHORTEST))

    def differences(self, first: Array, end: Array) -> Array:
        """Return how much the residual of each stretch differs from the one before, as if spans were all alike."""
        off = np.concatenate([first, end]) - self.seen
        off = np.where(np.isfinite(off), off, np.nanmax(np.abs(off), initial=1.0))  # never answered in the simulation
        return np.diff([0.0, *(float(np.median(off[part])) for part in self.parts)]) / self.widths


class Problem:
    """Residuals of the runs to fit, as a function of the parameters."""

    def __init__(self, runs: Sequence[Observed], cost: StepCost, free: Mapping[str, float], spread: float) -> None:
        self.runs = list(runs)
        self.start_cost = cost
        self.free = list(free)
        self.priors = free
        self.spread = spread
        self.windows = {run.name: Windows(run, COARSE) for run in runs if run.detailed}
        self.scatter = {run.name: 0.003 * run.makespan / WINDOWS**0.5 for run in runs if run.detailed}
        self.names = self.free + [
            f"cold.{run.name}.{kind}" for run in runs if run.cold for kind in ("prefill", "decode")
        ]
        self._known: dict[tuple[object, ...], Array] = {}

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
        left = iter([float(value) for value in values[len(self.free) :]])
        return {run.name: (next(left), next(left)) for run in self.runs if run.cold}

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
    return LogFit(problem.names, solution.x, errors, cost, cold, judged[0], left_out, judged[1])


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
