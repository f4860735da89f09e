"""Least squares where each evaluation is a simulation: damped Gauss-Newton steps on differences, with weak priors.

Parameters are positive and are moved by factors. Standard deviations of residuals are 1: the caller scales them. A
prior keeps a parameter that the data say nothing about at its start, and its uncertainty then is the prior's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Residuals = Callable[[Array], Array]
Squares = Callable[[Array, float], float]  # the sum of squares; beyond the limit, any part of it that is

# Of a parameter, for differences. Moves of 1e-7 change scheduling decisions, whose jumps are no slopes; at 1e-10 the
# rounding of instants near an hour is a tenth of what a small term makes of them.
STEP = 1e-8
DAMPING = (1e-3, 8.0, 7)  # at first; times this when a step fails; so many attempts
SCALES = (0.25, 0.35, 0.5, 0.7, 1.4, 2.0, 2.8, 4.0)  # tried before anything else
VALLEY = (-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 8.0)  # standard errors
NEAR, FAR, TRIES = 0.03, 0.12, 24  # how far points tried at random are, as a part of each parameter, and how many
FACTOR = 1.5  # natural logarithm of the most that one step may change a parameter by


@dataclass(frozen=True)
class Solution:
    """The best parameters, how certain their logarithms are, and what is left."""

    x: Array
    covariance: Array  # of the logarithms
    residuals: Array  # of the data alone
    rounds: int

    @property
    def errors(self) -> Array:
        """Standard errors, as parts of the parameters."""
        return np.asarray(np.sqrt(np.diag(self.covariance)), float)


def solve(
    residuals: Residuals,
    start: Array,
    centre: Array,
    width: Array,
    rounds: int = 12,
    gain: float = 2e-3,  # stop when a round takes less than this part off the sum of squares
    told: Callable[[int, float], None] = lambda done, left: None,
) -> Solution:
    """Minimise the residuals and the distance from the priors: a centre, and a width as a part of it."""

    def all_of(logs: Array) -> Array:
        return np.concatenate([residuals(np.exp(logs)), (logs - np.log(centre)) / width])

    x = np.log(start)
    left = all_of(x)
    jacobian, damping, done = slope(all_of, x, left), DAMPING[0], 0
    for done in range(1, rounds + 1):
        before = float(left @ left)
        x, left, damping = stepped(all_of, x, left, jacobian, damping)
        told(done, float(left @ left))
        if before - float(left @ left) <= gain * before:
            break
        jacobian = slope(all_of, x, left)
    covariance = np.asarray(np.linalg.inv(jacobian.T @ jacobian), float)
    return Solution(np.exp(x), covariance, left[: len(left) - len(x)], done)


def slope(function: Residuals, x: Array, at: Array) -> Array:
    """Return the derivatives by differences."""
    columns = []
    for k in range(len(x)):
        moved = x.copy()
        moved[k] += STEP
        columns.append((function(moved) - at) / STEP)
    return np.stack(columns, axis=1)


def stepped(function: Residuals, x: Array, left: Array, jacobian: Array, damping: float) -> tuple[Array, Array, float]:
    """Return the first damped step that is an improvement, or where we stand if none is."""
    normal, gradient = jacobian.T @ jacobian, jacobian.T @ left
    _, harder, attempts = DAMPING
    for _ in range(attempts):
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        tried = x - np.clip(step, -FACTOR, FACTOR)
        there = function(tried)
        if there @ there < left @ left:
            return tried, there, damping / harder
        damping *= harder
    return x, left, damping


def scaled(squares: Squares, start: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Return the start with groups of parameters scaled, one group after another, to what fits best.

    Where a server idles between requests, half of its cost may be no valley's side: steps alone would not get there.
    """
    best, least = start, squares(start, np.inf)
    for group in groups:
        place = list(group)
        begin = best
        for scale in SCALES if place else ():
            tried = begin.copy()
            tried[place] *= scale
            there = squares(tried, least)
            if there < least:
                best, least = tried, there
    return best


def beyond(squares: Squares, found: Solution, seed: int = 0) -> Array:
    """Return the best point near a solution, or it: every scheduling decision is a ledge that steps can end on.

    Looked at are the two lines along which it is least certain, and some points at random.
    """
    best, least = found.x, squares(found.x, np.inf)
    sizes, directions = np.linalg.eigh(found.covariance)
    reaches = [reach * np.sqrt(sizes[k]) * directions[:, k] for k in (-1, -2)[: len(sizes)] for reach in VALLEY]
    spread = np.random.default_rng(seed).normal(0.0, 1.0, (TRIES, len(found.x)))
    reaches += [(NEAR, FAR)[k % 2] * point for k, point in enumerate(spread)]
    for reach in reaches:
        tried = found.x * np.exp(np.clip(reach, -FACTOR, FACTOR))
        there = squares(tried, least)
        if there < least:
            best, least = tried, there
    return best
