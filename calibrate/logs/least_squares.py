"""Least squares where each evaluation is a simulation: damped Gauss-Newton steps with numerical derivatives and priors.

Parameters are positive; the solver works on their logarithms. The caller scales residuals to a standard deviation of 1.
A parameter that the data do not determine stays at its prior, with the uncertainty of the prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from .problem import Problem

Array = NDArray[np.float64]
Residuals = Callable[[Array], Array]
Progress = Callable[[int, float], None]  # receives the number of rounds, and the sum of squares
Squares = Callable[[Array, float], float]  # (parameters, limit) -> sum of squares, or any partial sum above the limit

MAX_ROUNDS = 12
MIN_GAIN = 2e-3  # stop when a round reduces the sum of squares by a smaller fraction
DAMPING_START, DAMPING_FACTOR, MAX_ATTEMPTS = 1e-3, 8.0, 7  # of one damped step
START_SCALES = (0.25, 0.35, 0.5, 0.7, 1.4, 2.0, 2.8, 4.0)  # tried before the first step
SEARCH_OFFSETS = (-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 8.0)  # standard errors
RANDOM_POINTS = 24
NEAR_OFFSET, FAR_OFFSET = 0.03, 0.12  # standard deviations of the random points (relative)
MAX_LOG_STEP = 1.5  # maximum change of a parameter's natural logarithm in one step


@dataclass(frozen=True)
class Solution:
    """The best parameters, and the covariance of their logarithms."""

    x: Array
    covariance: Array

    @property
    def errors(self) -> Array:
        """Relative standard errors of the parameters."""
        return np.asarray(np.sqrt(np.diag(self.covariance)), float)


def solve(
    problem: Problem, start: Array, rounds: int = MAX_ROUNDS, progress: Progress = lambda done, squares: None
) -> Solution:
    """Minimise the residuals of a problem and the distance from its priors."""
    centre, width = np.log(problem.start()), problem.width()

    def with_priors(logs: Array) -> Array:
        return np.concatenate([problem.residuals(np.exp(logs)), (logs - centre) / width])

    def derivatives(logs: Array) -> Array:
        return np.concatenate([problem.jacobian(np.exp(logs)), np.diag(1 / width)])

    x = np.log(start)
    rest = with_priors(x)
    slopes, damping = derivatives(x), DAMPING_START
    for done in range(1, rounds + 1):
        before = float(rest @ rest)
        x, rest, damping = damped_step(with_priors, x, rest, slopes, damping)
        progress(done, float(rest @ rest))
        if before - float(rest @ rest) <= MIN_GAIN * before:
            break
        slopes = derivatives(x)
    return Solution(np.exp(x), np.asarray(np.linalg.inv(slopes.T @ slopes), float))


def damped_step(
    function: Residuals, x: Array, rest: Array, jacobian: Array, damping: float
) -> tuple[Array, Array, float]:
    """Return the first damped step with smaller residuals, or `x` if there is none."""
    normal, gradient = jacobian.T @ jacobian, jacobian.T @ rest
    for _ in range(MAX_ATTEMPTS):
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        candidate = x - np.clip(step, -MAX_LOG_STEP, MAX_LOG_STEP)
        residuals = function(candidate)
        if residuals @ residuals < rest @ rest:
            return candidate, residuals, damping / DAMPING_FACTOR
        damping *= DAMPING_FACTOR
    return x, rest, damping


def scan_scales(squares: Squares, start: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Scale groups of start values, one group after another, to the best factor.

    If a server idles between requests, the sum of squares can be flat between the start and the solution.
    """
    best = start
    for group in groups:
        own = np.isin(np.arange(len(start)), list(group))
        scaled = [np.where(own, scale * best, best) for scale in START_SCALES if own.any()]
        best = best_of(squares, [best, *scaled])
    return best


def search_nearby(squares: Squares, solution: Solution, seed: int = 0) -> Array:
    """Return the best point near a solution, or the solution: scheduling decisions make local minima.

    The candidates are on the two least certain directions, plus random points.
    """
    sizes, directions = np.linalg.eigh(solution.covariance)
    axes = (-1, -2)[: len(sizes)]
    offsets = [offset * np.sqrt(sizes[k]) * directions[:, k] for k in axes for offset in SEARCH_OFFSETS]
    points = np.random.default_rng(seed).normal(0.0, 1.0, (RANDOM_POINTS, len(solution.x)))
    offsets += [(NEAR_OFFSET, FAR_OFFSET)[k % 2] * point for k, point in enumerate(points)]
    near = (solution.x * np.exp(np.clip(offset, -MAX_LOG_STEP, MAX_LOG_STEP)) for offset in offsets)
    return best_of(squares, [solution.x, *near])


def best_of(squares: Squares, points: Sequence[Array]) -> Array:
    """Return the first point with the smallest sum of squares."""
    best, minimum = points[0], squares(points[0], np.inf)
    for point in points[1:]:
        value = squares(point, minimum)
        if value < minimum:
            best, minimum = point, value
    return best
