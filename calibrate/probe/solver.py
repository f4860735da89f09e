"""Non-negative robust least squares on errors relative to the prediction, with the uncertainty of the result.

Errors relative to the measured time would give short measurements more weight, so scatter would bias a fit low.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable

import numpy as np
from scipy.optimize import lsq_linear

from .sample_set import Array, Groups

MISFIT = 0.02  # error of the model itself, relative: more samples of one shape do not make it exact
TOTAL_ERROR = 0.002  # accepted error of the total time of a kind of step with many samples
TOTAL_SHARE = 0.1  # of the standard error of a total that is accepted in addition
MAX_ITERATIONS = 15
CONVERGED, SETTLED = 3e-4, 0.01  # relative changes of the predictions and of the assumed values, to stop
HUBER = 3.0  # residuals above this multiple of the usual one count linearly, not squared
SMALLEST_PREDICTION = 0.5  # of the measured time: a smaller one would get more weight, and become still smaller
TIED_SHARE = 0.5  # a term is tied if its assumption leaves this share of its standard deviation


@dataclass
class Problem:
    """A linear model of the seconds of groups of samples."""

    groups: Groups
    names: list[str]  # of the terms
    design: Array  # one column per term
    assumed: Callable[[Array], tuple[Array, Array]]  # solution -> assumed value and its standard deviation, per term
    smoothness: Array  # rows that should be 0
    offset: Array  # seconds that the model already knows

    @property
    def target(self) -> Array:
        """The seconds to explain by the terms."""
        return self.groups.seconds - self.offset

    def predict(self, values: Array) -> Array:
        """Return the predicted seconds of every group."""
        return self.design @ values + self.offset


@dataclass(frozen=True)
class Weighted:
    """The rows of a least-squares problem: samples, the totals of kinds of steps, assumptions and smoothness."""

    weights: Array  # of the samples
    totals: Array  # shares of the samples in each total
    others: Array  # rows of assumptions and smoothness
    other_targets: Array

    def rows(self, design: Array) -> Array:
        """Return all rows, for the design of the samples."""
        return np.vstack([design * self.weights[:, None], self.totals @ design, self.others])

    def targets(self, target: Array) -> Array:
        """Return the targets of all rows, for those of the samples."""
        return np.concatenate([target * self.weights, self.totals @ target, self.other_targets])


@dataclass(frozen=True)
class Solution:
    """The values of the terms, and the problem and the weights that they solve."""

    problem: Problem
    weighted: Weighted
    values: Array
    predicted: Array  # seconds of every group

    @cached_property
    def rows(self) -> Array:
        """All rows of the weighted problem."""
        return self.weighted.rows(self.problem.design)

    @cached_property
    def inverse(self) -> Array:
        """The inverse of the Gram matrix of the rows."""
        scale = np.maximum(np.abs(self.rows).max(axis=0), 1e-300)
        scaled = self.rows / scale
        return np.asarray(np.linalg.pinv(scaled.T @ scaled, hermitian=True) / np.outer(scale, scale), float)

    @cached_property
    def residuals(self) -> Array:
        """The seconds that the terms do not explain, larger for samples that determine their own prediction."""
        own = self.rows[: len(self.problem.target)]
        leverage = np.clip(((own @ self.inverse) * own).sum(axis=1), 0.0, 0.9)
        return np.asarray((self.problem.target - self.problem.design @ self.values) / (1 - leverage), float)

    def standard_errors(self) -> Array:
        """Return the standard error of every term, from the actual residuals of the samples."""
        weighted, design = self.weighted, self.problem.design
        scores = design * (weighted.weights**2 * self.residuals)[:, None]
        scores += (weighted.totals.T * self.residuals[:, None]) @ (weighted.totals @ design)
        errors: Array = np.sqrt(np.sum((scores @ self.inverse) ** 2, axis=0))
        return errors

    def resampled(self, count: int, rng: np.random.Generator) -> list[Array]:
        """Return the terms of `count` fits to predicted times with random residuals (wild bootstrap).

        Assumed values vary by 100 %, so a term that no sample determines varies too.
        """
        weighted, fitted, targets = self.weighted, self.problem.design @ self.values, []
        # A curve through a few measured points has no residual there, but the points have an error.
        residuals = np.maximum(np.abs(self.residuals), self.problem.groups.errors * self.predicted)
        for _ in range(count):
            target = fitted + residuals * rng.standard_normal(len(fitted))
            others = weighted.other_targets * (1 + rng.standard_normal(len(weighted.other_targets)))
            targets.append(replace(weighted, other_targets=others).targets(target))
        return nonneg_solutions(self.rows, np.array(targets))

    def tied_terms(self) -> list[str]:
        """Return the terms whose error is not much smaller with the samples than by assumption alone."""
        assumed_error = self.problem.assumed(self.values)[1]
        error = np.sqrt(np.maximum(np.diag(self.inverse), 0.0))
        names = zip(self.problem.names, error, assumed_error, strict=True)
        return [name for name, own, assumed in names if own > TIED_SHARE * assumed]


def solve(problem: Problem) -> Solution:
    """Iterate: the weights, the assumptions and the limit of outliers follow from the solution before."""
    groups, target = problem.groups, problem.target
    errors = np.sqrt(MISFIT**2 + groups.errors**2)  # of the mean of each group, and of the model
    predicted, values = groups.seconds.copy(), np.zeros(len(problem.names))
    for _ in range(MAX_ITERATIONS):
        weighted = weigh(problem, predicted, errors, values)
        before, values = values, nonneg_least_squares(weighted.rows(problem.design), weighted.targets(target))
        following = np.maximum(problem.predict(values), SMALLEST_PREDICTION * groups.seconds)
        change = float(np.max(np.abs(following / predicted - 1)))
        predicted = following
        # Samples of a few shapes are predicted at once; what is assumed about the others still follows the solution.
        if change < CONVERGED and np.allclose(problem.assumed(before)[0], problem.assumed(values)[0], rtol=SETTLED):
            break
    return Solution(problem, weighted, values, problem.predict(values))


def weigh(problem: Problem, predicted: Array, errors: Array, values: Array) -> Weighted:
    """Return the weights that follow from a solution."""
    groups = problem.groups
    residuals = (groups.seconds - predicted) / (predicted * errors)
    usual = max(1.0, 1.4826 * float(np.median(np.abs(residuals))))
    robust = np.sqrt(np.minimum(1.0, HUBER * usual / np.maximum(np.abs(residuals), 1e-9)))
    kinds = np.unique(groups.kinds)
    shares = np.array([np.where(groups.kinds == kind, groups.counts, 0.0) for kind in kinds])
    total_errors = np.array([total_error((residuals * errors)[groups.kinds == kind]) for kind in kinds])
    assumed, deviation = problem.assumed(values)
    known = np.isfinite(deviation)
    return Weighted(
        robust / (usual * errors * predicted),
        shares / (total_errors * (shares @ predicted))[:, None],
        np.vstack([np.diag(1 / deviation)[known], problem.smoothness]),
        np.concatenate([(assumed / deviation)[known], np.zeros(len(problem.smoothness))]),
    )


def total_error(residuals: Array) -> float:
    """Return the accepted error of the total time of a kind: a few scattered steps do not determine it."""
    spread = float(np.sqrt(np.mean(residuals**2)) / np.sqrt(len(residuals)))
    return float(np.hypot(TOTAL_ERROR, TOTAL_SHARE * spread))


def nonneg_least_squares(rows: Array, targets: Array) -> Array:
    """Solve for terms of at least 0. A column of zeros gives 0."""
    return nonneg_solutions(rows, targets[None, :])[0]


def nonneg_solutions(rows: Array, targets: Array) -> list[Array]:
    """Solve the same problem for several targets, one per row of `targets`."""
    scale = np.abs(rows).max(axis=0)
    used = np.flatnonzero(scale)
    if not len(used):
        return [np.zeros(rows.shape[1]) for _ in targets]
    triangle, projected = reduce_rows(rows[:, used] / scale[used], targets.T)
    solutions = []
    for target in projected.T:
        solved = lsq_linear(triangle, target, (0, np.inf), method="bvls", tol=1e-12)
        solution = np.zeros(rows.shape[1])
        solution[used] = np.maximum(solved.x, 0.0) / scale[used]
        solutions.append(solution)
    return solutions


def reduce_rows(rows: Array, targets: Array) -> tuple[Array, Array]:
    """Return a least-squares problem with the same solution and one row per column of `rows`."""
    gram = rows.T @ rows
    gram[np.diag_indices_from(gram)] *= 1 + 1e-12
    try:
        lower = np.linalg.cholesky(gram)
        triangle, projected = lower.T, np.linalg.solve(lower, rows.T @ targets)
    except np.linalg.LinAlgError:  # columns are almost the same
        orthogonal, triangle = np.linalg.qr(rows)
        projected = orthogonal.T @ targets
    return triangle.astype(float), projected.astype(float)
