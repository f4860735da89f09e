"""What a step costs: a sum of terms, or a curve read off between measured points."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields
from typing import Any, Mapping, Sequence

from .core import BadInput, Shape, StepCost

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class LinearCost(StepCost):
    """Seconds as a sum of what a step does; small, readable, and what most fits come out as."""

    base: float = 0.0  # every step
    prefill: float = 0.0  # a step with prompts
    prefill_row: float = 0.0
    prefill_token: float = 0.0  # padded
    prefill_square: float = 0.0  # a squared token of a chunk
    prefill_cross: float = 0.0  # a token of a chunk x a token cached before it
    decode_step: float = 0.0  # a step with decodes
    decode_row: float = 0.0  # padded
    decode_live: float = 0.0
    context: float = 0.0  # a cached token that is read
    swap_block: float = 0.0

    def seconds(self, shape: Shape) -> float:
        seconds = self.base
        if shape.prefill_rows:
            seconds += (
                self.prefill
                + self.prefill_row * shape.prefill_rows
                + self.prefill_token * shape.prefill_tokens
                + self.prefill_square * shape.squares
                + self.prefill_cross * shape.cross
            )
        if shape.decode_rows:
            seconds += (
                self.decode_step
                + self.decode_row * shape.decode_rows
                + self.decode_live * shape.decode_live
                + self.context * shape.context
            )
        return seconds + self.swap_block * shape.swapped

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.base + (
            self.decode_step + self.decode_row * rows + self.decode_live * live + self.context * context
        )


@dataclass(frozen=True)
class TableCost(StepCost):
    """Prompts by a curve over padded tokens, decodes by a line for each batch gear, both interpolated between."""

    prefill: Points  # (padded tokens of the step, seconds), rising
    decode_gears: Sequence[tuple[float, float, float, float]]  # (rows, base, a live row, a cached token)
    prefill_row: float = 0.0
    prefill_square: float = 0.0
    prefill_cross: float = 0.0
    mixed: float = 0.0  # seconds that a step of both kinds takes beyond the two parts; negative where they share
    swap: float = 0.0  # a step that copies blocks
    swap_block: float = 0.0
    _lines: dict[int, tuple[float, float, float]] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, shape: Shape) -> float:
        seconds = self.swap + self.swap_block * shape.swapped if shape.swapped else 0.0
        if shape.prefill_rows:
            seconds += interpolate(self.prefill, shape.prefill_tokens) + self.prefill_row * shape.prefill_rows
            seconds += self.prefill_square * shape.squares + self.prefill_cross * shape.cross
        if shape.decode_rows:
            seconds += self.decode(shape.decode_rows, shape.decode_live, shape.context)
            if shape.prefill_rows:
                seconds += self.mixed
        return seconds

    def decode(self, rows: int, live: int, context: int) -> float:
        line = self._lines.get(rows)
        if line is None:
            gears = self.decode_gears
            base, row, token = (interpolate([(g[0], g[i]) for g in gears], rows) for i in (1, 2, 3))
            line = self._lines[rows] = (base, row, token)
        return line[0] + line[1] * live + line[2] * context


def interpolate(points: Points, x: float) -> float:
    """Read a curve between its points, and along its end pieces beyond them."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(1, bisect_right(points, (x, float("inf")))), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


COSTS: dict[str, type[LinearCost] | type[TableCost]] = {"linear": LinearCost, "table": TableCost}


def cost_from(given: Mapping[str, Any], where: str) -> StepCost:
    """Build a cost model from the mapping of a profile or a scenario."""
    terms = dict(given)
    kind = terms.pop("kind", "linear")
    if kind not in COSTS:
        raise BadInput(f"{where}.kind: expected one of {', '.join(COSTS)}, got {kind!r}")
    known = [f.name for f in fields(COSTS[kind]) if not f.name.startswith("_")]
    for name, value in terms.items():
        if name not in known:
            raise BadInput(f"{where}.{name}: unknown key; known: {', '.join(known)}")
        if kind == "linear" and (isinstance(value, bool) or not isinstance(value, (int, float)) or value != value):
            raise BadInput(f"{where}.{name}: expected a number of seconds, got {value!r}")
        if isinstance(value, list):
            terms[name] = [tuple(point) for point in value]
    try:
        return COSTS[kind](**terms)
    except TypeError as error:
        raise BadInput(f"{where}: {error}") from None
