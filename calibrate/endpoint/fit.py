"""Fit step costs to observed steps: relative least squares, in the form with the smallest held-out error.

The forms are linear, linear with attention inside prompts (squares), and curves between measured points (table).
A larger form must have a clearly smaller held-out error. Terms that the loads cannot separate are left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np
from numpy.typing import NDArray
from servesim.core import Shape, StepCost
from servesim.costs.curves import interpolate
from servesim.costs.linear import LinearCost
from servesim.costs.table import TableCost

from .steps import FrontEndLag, ObservedStep

Array = NDArray[np.float64]

FORMS = ("linear", "squares", "table")
MAX_ERROR_RATIO, MIN_ERROR_GAIN = 0.8, 0.002  # a larger form's held-out error must be smaller by both
MODEL_ERROR_FLOOR = 0.02  # of a step's time: assumed error of the cost model itself, lower bound of a step's error
MIN_INDEPENDENT = 1e-3  # fraction of a column that is not a combination of the columns before it
QUANTILES = 11  # of the noise in the profile
INTERVAL_ERRORS = 2.0  # standard errors on either side of an interval


class NotEnoughData(RuntimeError):
    """Too few loads succeeded for a fit."""


class Term(NamedTuple):
    """A parameter of the cost model, and its factor in a step."""

    name: str
    factor: Callable[[ObservedStep], float]
    may_be_negative: bool = False


@dataclass(frozen=True)
class FormFit:
    """The fitted parameters of one form."""

    form: str
    values: Mapping[str, float]
    errors: Mapping[str, float]  # standard errors
    dependent: tuple[str, ...]  # terms that the loads cannot separate from the rest
    cost: StepCost

    def seconds(self, step: ObservedStep) -> float:
        """Return the predicted time of a step, as a client sees it."""
        return self.cost.seconds(step.shape) + (self.values.get("front", 0.0) if step.idle else 0.0)


@dataclass(frozen=True)
class EndpointFit:
    """The chosen form and its accuracy."""

    chosen: FormFit
    steps: Sequence[ObservedStep]
    held_out: Mapping[str, Array]  # relative errors by kind of step, each load predicted from the others
    form_errors: Mapping[str, float]  # mean held-out error of every form
    lags: Sequence[FrontEndLag]

    @property
    def error(self) -> dict[str, dict[str, float]]:
        """Return statistics of the absolute held-out error, by kind of step."""
        absolute = {kind: np.abs(errors) for kind, errors in self.held_out.items() if len(errors)}
        return {
            kind: {"mean": float(np.mean(errors)), "median": float(np.median(errors)),
                   "p90": float(np.quantile(errors, 0.9)), "points": len(errors)}
            for kind, errors in absolute.items()
        }  # fmt: skip

    @property
    def noise(self) -> dict[str, list[float]]:
        """Return quantiles of measured over predicted step time, by kind, without the effect of late packets."""
        fractions, quantiles = np.linspace(0, 1, QUANTILES), {}
        for kind in dict.fromkeys(step.kind for step in self.steps):
            pairs = [(step, self.chosen.seconds(step)) for step in self.steps if step.kind == kind]
            measured = np.array([time for step, _ in pairs for time in step.samples])
            predicted = np.array([seconds for step, seconds in pairs for _ in step.samples])
            if len(measured) >= QUANTILES:
                variance = float(np.mean((measured - predicted) ** 2))
                scale = np.sqrt(max(0.0, variance - self.network_variance) / variance) if variance > 0 else 1.0
                quantiles[kind] = (1 + scale * (np.quantile(measured / predicted, fractions) - 1)).tolist()
        return quantiles

    @property
    def network_variance(self) -> float:
        """Return the variance of a step time from late packets: a late packet shortens the next step."""
        errors = [np.array(step.samples) - step.seconds for step in self.steps if step.kind == "decode"]
        return max(0.0, -2 * float(np.mean(np.concatenate([error[1:] * error[:-1] for error in errors]))))

    @property
    def grid(self) -> dict[str, list[int]]:
        """Return the measured range: smallest and largest shape."""
        ranges = {}
        for name in ("prefill_tokens", "prefill_rows", "decode_rows", "decode_live", "context"):
            values = [getattr(step.shape, name) for step in self.steps if getattr(step.shape, name)]
            if values:
                ranges[name] = [min(values), max(values)]
        return ranges

    def interval(self, name: str) -> tuple[float, float]:
        """Return the confidence interval of a parameter."""
        value, error = self.chosen.values[name], self.chosen.errors[name]
        low = value - INTERVAL_ERRORS * error
        return low if name == "mixed" else max(0.0, low), value + INTERVAL_ERRORS * error

    @property
    def lag(self) -> int | None:
        """Return the front-end lag of a busy server in model calls: engine.front_end.lag of a scenario."""
        return max(1, round(float(np.median([lag.calls for lag in self.lags])))) if self.lags else None

    @property
    def end_lag(self) -> bool | None:
        """Return whether a busy server ends streams one model call late."""
        return bool(np.median([lag.end_steps for lag in self.lags]) > 0.5) if self.lags else None


def fit_steps(steps: Sequence[ObservedStep], lags: Sequence[FrontEndLag] = ()) -> EndpointFit:
    """Fit every form and return the best one by held-out error."""
    for kind, what in (("prefill", "a first token"), ("decode", "steady decoding")):
        if not any(step.kind == kind for step in steps):
            raise NotEnoughData(f"no successful load shows {what}: cannot fit {kind} costs")
    best, form_errors = "", {}
    errors = {form: held_out_errors(form, steps) for form in FORMS if has_knots(form, steps)}
    for form in errors:
        form_errors[form] = mean_error(errors[form])
        smaller = form_errors.get(best, np.inf)
        if not best or form_errors[form] < min(MAX_ERROR_RATIO * smaller, smaller - MIN_ERROR_GAIN):
            best = form
    return EndpointFit(fit_form(best, steps), steps, errors[best], form_errors, lags)


def held_out_errors(form: str, steps: Sequence[ObservedStep]) -> dict[str, Array]:
    """Return relative errors by kind; each load is predicted by a fit without it."""
    errors: dict[str, list[float]] = {}
    for point in dict.fromkeys(step.point for step in steps):
        rest = [step for step in steps if step.point != point]
        if {step.kind for step in rest} != {step.kind for step in steps} or not has_knots(form, rest):
            continue
        fit = fit_form(form, rest)
        for step in steps:
            if step.point == point:
                errors.setdefault(step.kind, []).append(fit.seconds(step) / step.seconds - 1)
    return {kind: np.array(values) for kind, values in errors.items()}


def has_knots(form: str, steps: Sequence[ObservedStep]) -> bool:
    """Whether the curves of a form have points: the table's prefill curve needs steps with one prompt."""
    return form != "table" or any(step.kind == "prefill" and step.shape.prefill_rows == 1 for step in steps)


def mean_error(errors: Mapping[str, Array]) -> float:
    """Return the mean absolute error, averaged over the kinds."""
    return float(np.mean([np.mean(np.abs(values)) for values in errors.values()])) if errors else 0.0


def fit_form(form: str, steps: Sequence[ObservedStep]) -> FormFit:
    """Fit the parameters of a form; negative results become zero."""
    times = np.array([step.seconds for step in steps])
    scale = np.hypot(MODEL_ERROR_FLOOR * times, [step.jitter for step in steps])  # expected error of each step
    terms = terms_of(form, steps)
    columns = {term.name: np.array([term.factor(step) for step in steps]) / scale for term in terms}
    columns = {name: column for name, column in columns.items() if np.any(column)}
    names = independent_columns(columns)
    matrix = np.stack([columns[name] for name in names], axis=1)
    may_be_negative = {term.name for term in terms if term.may_be_negative}
    solution = nonneg_least_squares(matrix, times / scale, [name in may_be_negative for name in names])
    variances = residual_variances(matrix, matrix @ solution - times / scale, [step.kind for step in steps])
    width = np.linalg.norm(matrix, axis=0)
    errors = np.sqrt(np.linalg.pinv(matrix / width) ** 2 @ variances) / width
    values = dict(zip(names, solution.tolist()))
    dependent = tuple(name for name in columns if name not in values)
    return FormFit(form, values, dict(zip(names, errors.tolist())), dependent, cost_of(form, values))


def residual_variances(matrix: Array, residuals: Array, kinds: Sequence[str]) -> Array:
    """Return the residual variance of every step; steps of one kind share a variance."""
    variances, names = np.zeros(len(residuals)), np.array(kinds)
    for kind in set(kinds):
        selected = names == kind
        used = np.count_nonzero(np.any(matrix[selected], axis=0))
        squares = float(residuals[selected] @ residuals[selected])
        variances[selected] = squares / max(1, int(selected.sum()) - int(used))
    return variances


def nonneg_least_squares(matrix: Array, target: Array, may_be_negative: Sequence[bool]) -> Array:
    """Solve by least squares; drop columns with a forbidden negative result one by one."""
    kept = list(range(matrix.shape[1]))
    width = np.linalg.norm(matrix, axis=0)
    while True:
        solution = np.linalg.lstsq(matrix[:, kept] / width[kept], target, rcond=None)[0]
        below = [(value, column) for value, column in zip(solution, kept) if value < 0 and not may_be_negative[column]]
        if not below:
            break
        kept.remove(min(below)[1])
    values = np.zeros(matrix.shape[1])
    values[kept] = solution / width[kept]
    return values


def independent_columns(columns: Mapping[str, Array]) -> list[str]:
    """Return the columns that are not linear combinations of the columns before them."""
    kept: list[str] = []
    base: list[Array] = []
    for name, column in columns.items():
        rest = column.copy()
        for _ in range(2):  # the second pass removes rounding errors
            for other in base:
                rest -= other * (other @ rest)
        size = float(np.linalg.norm(rest))
        if size > MIN_INDEPENDENT * float(np.linalg.norm(column)):
            kept.append(name)
            base.append(rest / size)
    return kept


def terms_of(form: str, steps: Sequence[ObservedStep]) -> list[Term]:
    """Return the terms of a form; terms that can depend on others come last."""
    if form == "table":
        one_prompt = [step.shape for step in steps if step.kind == "prefill" and step.shape.prefill_rows == 1]
        lengths = {shape.prefill_tokens for shape in one_prompt}
        batches = {step.shape.decode_rows for step in steps if step.kind == "decode"}
        terms = curve_terms("prefill", sorted(lengths), lambda shape: shape.prefill_tokens if shape.prefill_rows else 0)
        terms += curve_terms("decode_gears", sorted(batches), lambda shape: shape.decode_rows)
    else:
        terms = [
            Term("prefill", lambda step: float(step.shape.prefill_rows > 0)),
            Term("prefill_token", lambda step: step.shape.prefill_tokens),
            Term("decode_step", lambda step: float(step.shape.decode_rows > 0)),
            Term("decode_live", lambda step: step.shape.decode_live),
        ]
    if form == "squares":
        terms.append(Term("prefill_square", lambda step: step.shape.squares))
    return [
        *terms,
        Term("context", lambda step: step.shape.context),
        Term("front", lambda step: float(step.idle)),
        Term("mixed", lambda step: float(step.kind == "mixed"), may_be_negative=True),
        Term("prefill_row", lambda step: step.shape.prefill_rows),
    ]


def curve_terms(name: str, knots: Sequence[int], size: Callable[[Shape], int]) -> list[Term]:
    """Return the terms of a curve over `size`: its value at every knot."""

    def factor(knot: int) -> Callable[[ObservedStep], float]:
        points = [(float(other), float(other == knot)) for other in knots]
        return lambda step: interpolate(points, size(step.shape)) if size(step.shape) else 0.0

    return [Term(f"{name}.{knot}", factor(knot)) for knot in knots]


def cost_of(form: str, values: Mapping[str, float]) -> StepCost:
    """Return the cost model with these parameters."""
    names = ("prefill_row", "context", "prefill_square", "prefill_token", "decode_live")
    shared: dict[str, Any] = {name: values[name] for name in names if name in values}
    if form == "table":
        prefill_curve, decode_curve = curve_points("prefill", values), curve_points("decode_gears", values)
        return TableCost(prefill_curve, decode_curve, mixed=values.get("mixed", 0.0), **shared)
    prefill, decode = values.get("prefill", 0.0), values.get("decode_step", 0.0)
    base = min(max(0.0, -values.get("mixed", 0.0)), prefill, decode)  # a mixed step pays it once
    return LinearCost(base=base, prefill=prefill - base, decode_step=decode - base, **shared)


def curve_points(name: str, values: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(float(key.partition(".")[2]), value) for key, value in values.items() if key.startswith(name + ".")]
