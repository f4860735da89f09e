"""A cost model read from measured curves: prefill over tokens, decode over rows and context."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from servesim.core import Shape, StepCost

Points = Sequence[tuple[float, float]]
NEAR = 128  # cached tokens of a row up to which attention is split up in another way than further on


@dataclass(frozen=True)
class TableCost(StepCost):
    """Prompts by a curve over padded tokens, decodes by a line for each batch gear, both interpolated between."""

    prefill: Points = ()  # (padded tokens of the step, seconds), rising
    decode_gears: Sequence[Sequence[float]] = ()  # (rows, base, a live row, a cached token), the last two optional
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


def interpolate(points: Points, x: float) -> float:
    """Read a curve between its points, and along its end pieces beyond them."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(1, bisect_right(points, (x, float("inf")))), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
