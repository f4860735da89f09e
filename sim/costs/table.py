"""A cost model from measured curves: prefill by tokens, decode by rows and context. Old fits wrote it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Optional

from servesim.core import Shape, StepCost
from servesim.core.native import mypyc_attr

from .curves import Points, interpolate

NEAR_TOKENS = 128  # per row: attention kernels split the first cached tokens differently from the rest


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class TableCost(StepCost):
    """Prefill: a curve over padded tokens. Decode: a linear cost per padding bucket (gear). Both are interpolated."""

    prefill: Points = ()  # (padded tokens of the step, seconds), increasing
    decode_gears: Sequence[Sequence[float]] = ()  # (rows, base, per live row, per cached token); the last two optional
    decode_curves: Sequence[Sequence[Any]] = ()  # instead of decode_gears: (rows, curve over context)
    prefill_row: float = 0.0
    prefill_square: float = 0.0
    prefill_cross: float = 0.0
    prefill_depth: float = 0.0  # per key that a prompt token attends to, on average
    prefill_area: float = 0.0  # per (padded tokens)^2 / rows: attention of equally padded rows
    decode_live: float = 0.0  # per live row, in every bucket
    context: float = 0.0  # per cached token that is read, in every bucket
    token_gears: Sequence[float] = ()  # padding buckets of prefill tokens; larger steps are not padded
    rounded: bool = False  # decode rows are padded to the next bucket
    mixed: float = 0.0  # mixed step: seconds on top of prefill and decode; negative if they share a fixed part
    mixed_row: float = 0.0  # mixed step: per decode row
    mixed_context: Optional[float] = None  # mixed step: per cached token; decodes then count as prefill tokens
    mixed_near: float = 0.0  # extra per cached token among the first NEAR_TOKENS of each decode
    mixed_token: float = 0.0  # mixed step: per padded token, up to the last bucket
    swap: float = 0.0  # per step that swaps blocks
    swap_block: float = 0.0
    base: float = 0.0  # per step with prompts or decodes, for example host time
    _lines: dict[int, tuple[float, float, float]] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through the constructor: nothing can set the fields of a compiled frozen object."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def seconds(self, shape: Shape) -> float:
        seconds = self.swap + self.swap_block * shape.swapped if shape.swapped else 0.0
        if not shape.prefill_rows:
            return seconds + (self.decode(*shape[5:8]) if shape.decode_rows else 0.0)
        tokens = float(shape.prefill_tokens)
        if not shape.decode_rows:
            seconds += self.base
        else:
            seconds += self.mixed
            if self.mixed_context is None:
                seconds += self.decode(*shape[5:8])  # with the base
            else:
                seconds += self.base
                tokens += shape.decode_rows
                seconds += self.mixed_row * shape.decode_rows + self.mixed_context * shape.context
                if self.mixed_near:
                    seconds += self.mixed_near * min(shape.context, NEAR_TOKENS * shape.decode_rows)
        if self.token_gears and tokens <= self.token_gears[-1]:
            tokens = self.token_gears[bisect_left(self.token_gears, tokens)]
        if shape.decode_rows and self.mixed_token:
            seconds += self.mixed_token * min(tokens, self.token_gears[-1] if self.token_gears else tokens)
        seconds += interpolate(self.prefill, tokens) + self.prefill_row * shape.prefill_rows
        seconds += self.prefill_square * shape.squares + self.prefill_cross * shape.cross
        if self.prefill_depth and shape.prefill_live:
            seconds += self.prefill_depth * (shape.cross + shape.squares / 2) / shape.prefill_live
        seconds += self.prefill_area * shape.prefill_tokens**2 / shape.prefill_rows
        if self.mixed < 0.0 and shape.decode_rows:  # a mixed step takes at least as long as its decodes alone
            return max(seconds, self.decode(*shape[5:8]))
        return seconds

    def decode(self, rows: int, live: int, context: int) -> float:
        if self.decode_curves:
            return interpolate(self._curve(rows), context) + self.decode_live * live + self.base
        fixed, slope = self._line(rows, live)
        return fixed + slope * context

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        return None if self.decode_curves else self._line(rows, live)

    def _line(self, rows: int, live: int) -> tuple[float, float]:
        terms = self._lines.get(rows)
        if terms is None:
            terms = self._lines[rows] = self._bucket_terms(rows)
        return terms[0] + terms[1] * live, terms[2]

    def _curve(self, rows: int) -> Points:
        for bucket, curve in self.decode_curves:
            if bucket >= rows:
                return curve  # type: ignore[no-any-return]
        bucket, curve = self.decode_curves[-1]  # above the last bucket, the cost per row stays constant
        return [(x * rows / bucket, y * rows / bucket) for x, y in curve]

    def _bucket_terms(self, rows: int) -> tuple[float, float, float]:
        """Return the fixed seconds, the seconds per live row, and the seconds per cached token."""
        points = self.decode_gears
        if self.rounded:
            rows = next((int(point[0]) for point in points if point[0] >= rows), rows)
        base, row, token = (
            interpolate([(point[0], point[i] if len(point) > i else 0.0) for point in points], rows) for i in (1, 2, 3)
        )
        return base + self.base, row + self.decode_live, token + self.context
