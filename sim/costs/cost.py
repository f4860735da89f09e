"""What a step costs: a sum of terms, or a curve read off between measured points."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Optional

from servesim.core import BadInput, Shape, StepCost

Points = Sequence[tuple[float, float]]
NEAR = 128  # cached tokens of a row up to which attention is split up in another way than further on


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
        fixed, slope = self.line(rows, live)
        return fixed + slope * context

    def line(self, rows: int, live: int) -> tuple[float, float]:
        return self.base + (self.decode_step + self.decode_row * rows + self.decode_live * live), self.context


@dataclass(frozen=True)
class TableCost(StepCost):
    """Prompts by a curve over padded tokens, decodes by a line for each batch gear, both interpolated between."""

    prefill: Points = ()  # (padded tokens of the step, seconds), rising
    decode_gears: Sequence[
        Sequence[float]
    ] = ()  # (rows, base, a live row, a cached token); the last two may be left out
    decode_curves: Sequence[Sequence[Any]] = ()  # instead of lines: (rows, curve over the context), rows to the next
    prefill_row: float = 0.0
    prefill_square: float = 0.0
    prefill_cross: float = 0.0
    prefill_depth: float = 0.0  # a key that a prompt token attends to, in the mean: what a lone row cannot spread out
    prefill_area: float = 0.0  # squared padded tokens over rows: attention of rows that are all padded alike
    decode_live: float = 0.0  # a live row, whatever the gear
    context: float = 0.0  # a cached token that is read, whatever the gear
    token_gears: Sequence[int] = ()  # tokens of a step with prompts run as the next of these, more as they are
    rounded: bool = False  # rows between two gears run as the larger one, as where the device pads them
    mixed: float = 0.0  # seconds that a step of both kinds takes beyond the two parts; negative where they share
    mixed_row: float = 0.0  # a decode in a step with prompts
    mixed_context: Optional[float] = None  # if given, decodes of such a step are tokens of its prompts, and this a read
    mixed_near: float = 0.0  # a read beyond that, among the first NEAR of each decode
    mixed_token: float = 0.0  # a token of such a step, padded and up to the last gear: what both kinds' kernels share
    swap: float = 0.0  # a step that copies blocks
    swap_block: float = 0.0
    _lines: dict[int, tuple[float, float, float]] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, shape: Shape) -> float:
        seconds = self.swap + self.swap_block * shape.swapped if shape.swapped else 0.0
        if not shape.prefill_rows:
            return seconds + (self.decode(*shape[5:8]) if shape.decode_rows else 0.0)
        tokens = shape.prefill_tokens
        if shape.decode_rows:
            seconds += self.mixed
            if self.mixed_context is None:
                seconds += self.decode(*shape[5:8])
            else:
                tokens += shape.decode_rows
                seconds += self.mixed_row * shape.decode_rows + self.mixed_context * shape.context
                if self.mixed_near:
                    seconds += self.mixed_near * min(shape.context, NEAR * shape.decode_rows)
        if self.token_gears and tokens <= self.token_gears[-1]:
            tokens = self.token_gears[bisect_left(self.token_gears, tokens)]
        if shape.decode_rows and self.mixed_token:
            seconds += self.mixed_token * min(tokens, self.token_gears[-1] if self.token_gears else tokens)
        seconds += interpolate(self.prefill, tokens) + self.prefill_row * shape.prefill_rows
        seconds += self.prefill_square * shape.squares + self.prefill_cross * shape.cross
        if self.prefill_depth and shape.prefill_live:
            seconds += self.prefill_depth * (shape.cross + shape.squares / 2) / shape.prefill_live
        return seconds + self.prefill_area * shape.prefill_tokens**2 / shape.prefill_rows

    def decode(self, rows: int, live: int, context: int) -> float:
        if self.decode_curves:
            return interpolate(self._curve(rows), context) + self.decode_live * live
        fixed, slope = self._line(rows, live)
        return fixed + slope * context

    def line(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        return None if self.decode_curves else self._line(rows, live)

    def _line(self, rows: int, live: int) -> tuple[float, float]:
        line = self._lines.get(rows)
        if line is None:
            line = self._lines[rows] = self._gear(rows)
        return line[0] + line[1] * live, line[2]

    def _curve(self, rows: int) -> Points:
        for gear, curve in self.decode_curves:
            if gear >= rows:
                return curve  # type: ignore[no-any-return]
        gear, curve = self.decode_curves[-1]  # beyond the last, every row costs what it does there
        return [(x * rows / gear, y * rows / gear) for x, y in curve]

    def _gear(self, rows: int) -> tuple[float, float, float]:
        gears = self.decode_gears
        if self.rounded:
            rows = next((int(gear[0]) for gear in gears if gear[0] >= rows), rows)
        base, row, token = (
            interpolate([(gear[0], gear[i] if len(gear) > i else 0.0) for gear in gears], rows) for i in (1, 2, 3)
        )
        return base, row + self.decode_live, token + self.context


class NoisyCost(StepCost):
    """Another model's times, each stretched by a factor drawn from how measured steps of its kind scattered."""

    steady: ClassVar[bool] = False

    def __init__(self, cost: StepCost, noise: Mapping[str, Sequence[float]], seed: int) -> None:
        self.cost = cost
        # Quantiles of measured over expected time, evenly spaced from the least to the most.
        self.noise = {kind: [float(factor) for factor in factors] for kind, factors in noise.items() if factors}
        self._random = random.Random(f"step noise {seed}")

    def seconds(self, shape: Shape) -> float:
        if shape.prefill_rows:
            kind = "mixed" if shape.decode_rows and "mixed" in self.noise else "prefill"
        else:
            kind = "decode" if shape.decode_rows else "swap"
        return self.cost.seconds(shape) * self._factor(kind)

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.cost.decode(rows, live, context) * self._factor("decode")

    def _factor(self, kind: str) -> float:
        drawn = self._random.random()  # drawn even where there is no noise, so that kinds do not shift each other
        factors = self.noise.get(kind)
        if not factors:
            return 1.0
        place = drawn * (len(factors) - 1)
        low = int(place)
        return factors[low] + (factors[min(low + 1, len(factors) - 1)] - factors[low]) * (place - low)


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
        terms[name] = term(kind, name, value, f"{where}.{name}")
    if kind == "table" and not ("prefill" in terms and ("decode_gears" in terms or "decode_curves" in terms)):
        raise BadInput(
            f"{where}: expected prefill, and decode_gears or decode_curves; got {', '.join(terms) or 'none'}"
        )
    try:
        return COSTS[kind](**terms)
    except TypeError as error:
        raise BadInput(f"{where}: {error}") from None


def term(kind: str, name: str, value: Any, where: str) -> Any:
    """Return one checked part of a cost model."""
    if kind == "table" and name in ("prefill", "decode_gears"):
        return table(value, 2 if name == "prefill" else 4, where)
    if name == "decode_curves":
        return curves(value, where)
    if name == "token_gears":
        return [gear for (gear,) in table([[gear] for gear in value], 1, where)] if value else ()
    if (name == "rounded" and isinstance(value, bool)) or (name == "mixed_context" and value is None):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadInput(f"{where}: expected a number of seconds, got {value!r}")
    return value


def table(points: Any, width: int, where: str) -> list[tuple[float, ...]]:
    """Return the checked points of a curve: numbers, and rising in the first of them."""
    if not isinstance(points, (list, tuple)) or not points:
        raise BadInput(f"{where}: expected a list of points, got {points!r}")
    for k, point in enumerate(points):
        fine = isinstance(point, (list, tuple)) and min(2, width) <= len(point) <= width
        if not fine or any(type(x) not in (int, float) or not math.isfinite(x) for x in point):
            raise BadInput(f"{where}[{k}]: expected {'2 to ' if width > 2 else ''}{width} numbers, got {point!r}")
        if k and point[0] <= points[k - 1][0]:
            raise BadInput(f"{where}[{k}]: expected more than {points[k - 1][0]:g} first, got {point[0]:g}")
    return [tuple(point) for point in points]


def curves(given: Any, where: str) -> list[tuple[float, list[tuple[float, ...]]]]:
    """Return checked curves, each behind the number it is for, which rises."""
    if not isinstance(given, (list, tuple)) or any(
        not isinstance(one, (list, tuple)) or len(one) != 2 for one in given
    ):
        raise BadInput(f"{where}: expected a list of (rows, curve) pairs")
    found = [(one[0], table(one[1], 2, f"{where}[{k}]")) for k, one in enumerate(given)]
    table([[rows] for rows, _ in found], 1, where)
    return found


def mapping(cost: StepCost) -> dict[str, Any]:
    """Return a cost model as the mapping that `cost_from` builds it from, defaults left out."""
    for kind, known in COSTS.items():
        if type(cost) is known:
            parts = [f for f in fields(known) if not f.name.startswith("_")]
            values = {f.name: getattr(cost, f.name) for f in parts if getattr(cost, f.name) not in (f.default, [])}
            return {"kind": kind, **{name: listed(value) for name, value in values.items()}}
    raise BadInput(f"cost: a {type(cost).__name__} cannot be written down")


def listed(value: Any) -> Any:
    """Return a value with its tuples as lists, as YAML writes them."""
    return [listed(part) for part in value] if isinstance(value, (list, tuple)) else value
