"""Step costs fitted to the steps that clients saw: relative least squares, in the form that predicts unseen loads best.

Linear, linear with attention inside prompts, or curves between measured points: a larger form is taken only where it
predicts loads that it has not seen clearly better. What the loads cannot tell apart is left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np
from numpy.typing import NDArray
from servesim.core import Shape, StepCost
from servesim.costs.linear import LinearCost
from servesim.costs.table import TableCost, interpolate

from .steps import Late, Seen

Array = NDArray[np.float64]

FORMS = ("linear", "squares", "table")
BETTER, GAIN = (
    0.8,
    0.002,
)  # a larger form's held-out error must be below this part of a smaller one's, and less by this
TRUST = 0.02  # of a step's time, that the model itself is taken to be off by: a sharper look at a step counts no more
ALIKE = 1e-3  # a column that differs from the others by less than this part of itself cannot be told apart
QUANTILES = 11  # of the noise that is kept
WIDE = 2.0  # standard errors on either side of an interval


class TooLittle(RuntimeError):
    """Not enough went well for a fit."""


class Term(NamedTuple):
    """A number to be found, and what it is multiplied by in a step."""

    name: str
    of: Callable[[Seen], float]
    negative: bool = False  # whether it may be


@dataclass(frozen=True)
class Solved:
    """The numbers of one form."""

    form: str
    values: Mapping[str, float]
    errors: Mapping[str, float]  # standard errors
    blended: tuple[str, ...]  # what could not be told apart from the rest
    cost: StepCost

    def seconds(self, seen: Seen) -> float:
        """Return what such a step should take, as a client sees it."""
        return self.cost.seconds(seen.shape) + (self.values.get("front", 0.0) if seen.idle else 0.0)


@dataclass(frozen=True)
class EndpointFit:
    """The chosen form, and how far it can be trusted."""

    solved: Solved
    seen: Sequence[Seen]
    held_out: Mapping[str, Array]  # relative errors by kind of step, each load predicted from the others
    compared: Mapping[str, float]  # mean held-out error of every form
    late: Sequence[Late]

    @property
    def error(self) -> dict[str, dict[str, float]]:
        """Return what the fit is off by, either way, on loads it has not seen, by kind."""
        off = {kind: np.abs(errors) for kind, errors in self.held_out.items() if len(errors)}
        return {
            kind: {"mean": float(np.mean(found)), "median": float(np.median(found)),
                   "p90": float(np.quantile(found, 0.9)), "points": len(found)}
            for kind, found in off.items()
        }  # fmt: skip

    @property
    def noise(self) -> dict[str, list[float]]:
        """Return quantiles of single steps over what the fit says, by kind, without what late packets add."""
        places, found = np.linspace(0, 1, QUANTILES), {}
        for kind in dict.fromkeys(seen.kind for seen in self.seen):
            some = [(seen, self.solved.seconds(seen)) for seen in self.seen if seen.kind == kind]
            single = np.array([time for seen, _ in some for time in seen.single])
            told = np.array([seconds for seen, seconds in some for _ in seen.single])
            if len(single) >= QUANTILES:
                variance = float(np.mean((single - told) ** 2))
                kept = np.sqrt(max(0.0, variance - self.packets) / variance) if variance > 0 else 1.0
                found[kind] = (1 + kept * (np.quantile(single / told, places) - 1)).tolist()
        return found

    @property
    def packets(self) -> float:
        """Return what late packets add to the variance of a step: one that comes late shortens the step after it."""
        off = [np.array(seen.single) - seen.seconds for seen in self.seen if seen.kind == "decode"]
        return max(0.0, -2 * float(np.mean(np.concatenate([some[1:] * some[:-1] for some in off]))))

    @property
    def grid(self) -> dict[str, list[int]]:
        """Return the least and the most of what was measured."""
        found = {}
        for name in ("prefill_tokens", "prefill_rows", "decode_rows", "decode_live", "context"):
            values = [getattr(seen.shape, name) for seen in self.seen if getattr(seen.shape, name)]
            if values:
                found[name] = [min(values), max(values)]
        return found

    def interval(self, name: str) -> tuple[float, float]:
        """Return between what a parameter lies."""
        value, error = self.solved.values[name], self.solved.errors[name]
        low = value - WIDE * error
        return low if name == "mixed" else max(0.0, low), value + WIDE * error

    @property
    def lag(self) -> int | None:
        """Return the model calls after which a busy server sees a request, as engine.front_end of a scenario has it."""
        return max(1, round(float(np.median([late.calls for late in self.late])))) if self.late else None

    @property
    def end_lag(self) -> bool | None:
        """Return whether a busy server ends streams a model call late."""
        return bool(np.median([late.end for late in self.late]) > 0.5) if self.late else None


def fit_steps(seen: Sequence[Seen], late: Sequence[Late] = ()) -> EndpointFit:
    """Fit every form, judge each by loads it has not seen, return the one to use."""
    for kind, what in (("prefill", "first tokens"), ("decode", "steady decoding")):
        if not any(step.kind == kind for step in seen):
            raise TooLittle(f"no load in which {what} could be timed went well: {kind} costs cannot be fitted")
    best, compared = "", {}
    judged = {form: held_out(form, seen) for form in FORMS if has_knots(form, seen)}
    for form in judged:
        compared[form] = score(judged[form])
        if not best or compared[form] < min(BETTER * compared[best], compared[best] - GAIN):
            best = form
    return EndpointFit(solve(best, seen), seen, judged[best], compared, late)


def held_out(form: str, seen: Sequence[Seen]) -> dict[str, Array]:
    """Return relative errors by kind, every load predicted from a fit without it."""
    errors: dict[str, list[float]] = {}
    for point in dict.fromkeys(step.point for step in seen):
        rest = [step for step in seen if step.point != point]
        if {step.kind for step in rest} != {step.kind for step in seen} or not has_knots(form, rest):
            continue
        solved = solve(form, rest)
        for step in seen:
            if step.point == point:
                errors.setdefault(step.kind, []).append(solved.seconds(step) / step.seconds - 1)
    return {kind: np.array(found) for kind, found in errors.items()}


def has_knots(form: str, seen: Sequence[Seen]) -> bool:
    """Whether the curves of a form have points: the table's prefill curve needs prompts that ran alone."""
    return form != "table" or any(step.kind == "prefill" and step.shape.prefill_rows == 1 for step in seen)


def score(errors: Mapping[str, Array]) -> float:
    """Return one number for held-out errors: the mean over kinds."""
    return float(np.mean([np.mean(np.abs(found)) for found in errors.values()])) if errors else 0.0


def solve(form: str, seen: Sequence[Seen]) -> Solved:
    """Find the numbers of a form; those that come out below nothing are nothing."""
    took = np.array([step.seconds for step in seen])
    scale = np.hypot(TRUST * took, [step.blur for step in seen])  # what each may be off by
    terms = terms_of(form, seen)
    columns = {term.name: np.array([term.of(step) for step in seen]) / scale for term in terms}
    columns = {name: column for name, column in columns.items() if np.any(column)}
    names = told_apart(columns)
    matrix = np.stack([columns[name] for name in names], axis=1)
    free = {term.name for term in terms if term.negative}
    found = above_nothing(matrix, took / scale, [name in free for name in names])
    spread = spreads(matrix, matrix @ found - took / scale, [step.kind for step in seen])
    width = np.linalg.norm(matrix, axis=0)
    errors = np.sqrt(np.linalg.pinv(matrix / width) ** 2 @ spread) / width
    values = dict(zip(names, found.tolist()))
    blended = tuple(name for name in columns if name not in values)
    return Solved(form, values, dict(zip(names, errors.tolist())), blended, cost_of(form, values))


def spreads(matrix: Array, left: Array, kinds: Sequence[str]) -> Array:
    """Return the variance of every step's residual, taken to be the same for steps of a kind."""
    found, names = np.zeros(len(left)), np.array(kinds)
    for kind in set(kinds):
        mine = names == kind
        used = np.count_nonzero(np.any(matrix[mine], axis=0))
        found[mine] = float(left[mine] @ left[mine]) / max(1, int(mine.sum()) - int(used))
    return found


def above_nothing(matrix: Array, target: Array, free: Sequence[bool]) -> Array:
    """Solve by least squares, numbers that may not be negative being left out one by one while some are."""
    kept = list(range(matrix.shape[1]))
    width = np.linalg.norm(matrix, axis=0)
    while True:
        found = np.linalg.lstsq(matrix[:, kept] / width[kept], target, rcond=None)[0]
        below = [(value, place) for value, place in zip(found, kept) if value < 0 and not free[place]]
        if not below:
            break
        kept.remove(min(below)[1])
    values = np.zeros(matrix.shape[1])
    values[kept] = found / width[kept]
    return values


def told_apart(columns: Mapping[str, Array]) -> list[str]:
    """Return the columns that are more than a mixture of those before them."""
    kept: list[str] = []
    base: list[Array] = []
    for name, column in columns.items():
        rest = column.copy()
        for _ in range(2):  # twice, for the rounding of the first time
            for other in base:
                rest -= other * (other @ rest)
        size = float(np.linalg.norm(rest))
        if size > ALIKE * float(np.linalg.norm(column)):
            kept.append(name)
            base.append(rest / size)
    return kept


def terms_of(form: str, seen: Sequence[Seen]) -> list[Term]:
    """Return the numbers that a form has; what may be blended with others comes last."""
    if form == "table":
        alone = [step.shape for step in seen if step.kind == "prefill" and step.shape.prefill_rows == 1]
        lengths = {shape.prefill_tokens for shape in alone}
        gears = {step.shape.decode_rows for step in seen if step.kind == "decode"}
        terms = curve("prefill", sorted(lengths), lambda shape: shape.prefill_tokens if shape.prefill_rows else 0)
        terms += curve("decode_gears", sorted(gears), lambda shape: shape.decode_rows)
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
        Term("mixed", lambda step: float(step.kind == "mixed"), negative=True),
        Term("prefill_row", lambda step: step.shape.prefill_rows),
    ]


def curve(name: str, knots: Sequence[int], of: Callable[[Shape], int]) -> list[Term]:
    """Return the terms of a curve: its height at every knot."""

    def height(knot: int) -> Callable[[Seen], float]:
        points = [(float(other), float(other == knot)) for other in knots]
        return lambda step: interpolate(points, of(step.shape)) if of(step.shape) else 0.0

    return [Term(f"{name}.{knot}", height(knot)) for knot in knots]


def cost_of(form: str, values: Mapping[str, float]) -> StepCost:
    """Return the cost model of a form's numbers."""
    names = ("prefill_row", "context", "prefill_square", "prefill_token", "decode_live")
    shared: dict[str, Any] = {name: values[name] for name in names if name in values}
    if form == "table":
        points, gears = heights("prefill", values), heights("decode_gears", values)
        return TableCost(points, gears, mixed=values.get("mixed", 0.0), **shared)
    prefill, decode = values.get("prefill", 0.0), values.get("decode_step", 0.0)
    base = min(max(0.0, -values.get("mixed", 0.0)), prefill, decode)  # what a step of both kinds pays only once
    return LinearCost(base=base, prefill=prefill - base, decode_step=decode - base, **shared)


def heights(name: str, values: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(float(key.partition(".")[2]), value) for key, value in values.items() if key.startswith(name + ".")]
