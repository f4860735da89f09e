"""Least squares where each evaluation is a simulation: damped Gauss-Newton steps on differences, with weak priors.

Standard deviations of residuals are 1: the caller scales them. A prior keeps a parameter that the data say nothing
about at its start, and its uncertainty then is the prior's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Residuals = Callable[[Array], Array]

STEP = 0.004  # of a parameter, for differences: large enough to look past single scheduling decisions
DAMPING = (1e-4, 8.0, 6)  # at first; times this when a step fails; so many attempts


@dataclass(frozen=True)
class Solution:
    """The best parameters, their covariance, and what is left."""

    x: Array
    covariance: Array
    residuals: Array  # of the data alone
    rounds: int

    @property
    def errors(self) -> Array:
        """Standard errors."""
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
    """Minimise the residuals and the distance from the priors (centre, width); parameters stay at 0 or above."""

    def all_of(x: Array) -> Array:
        return np.concatenate([residuals(x), (x - centre) / width])

    x, left = start, all_of(start)
    jacobian, damping, done = slope(all_of, x, left, width), DAMPING[0], 0
    for done in range(1, rounds + 1):
        before = float(left @ left)
        x, left, damping = stepped(all_of, x, left, jacobian, damping)
        told(done, float(left @ left))
        if before - float(left @ left) <= gain * before:
            break
        jacobian = slope(all_of, x, left, width)
    covariance = np.asarray(np.linalg.inv(jacobian.T @ jacobian), float)
    return Solution(x, covariance, left[: len(left) - len(x)], done)


def slope(function: Residuals, x: Array, at: Array, width: Array) -> Array:
    """Return the derivatives by differences."""
    columns = []
    for k, value in enumerate(x):
        step = max(STEP * abs(value), STEP * 0.02 * width[k])
        moved = x.copy()
        moved[k] += step
        columns.append((function(moved) - at) / step)
    return np.stack(columns, axis=1)


def stepped(function: Residuals, x: Array, left: Array, jacobian: Array, damping: float) -> tuple[Array, Array, float]:
    """Return the first damped step that is an improvement, or where we stand if none is."""
    normal, gradient = jacobian.T @ jacobian, jacobian.T @ left
    _, harder, attempts = DAMPING
    for _ in range(attempts):
        tried = np.maximum(x - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient), 0.0)
        there = function(tried)
        if there @ there < left @ left:
            return tried, there, damping / harder
        damping *= harder
    return x, left, damping
