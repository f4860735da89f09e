"""A cost model in parts: prefill, decode, mixed steps, swaps and host time.

All numbers are at least 0 and all curves rise, so a step with more tokens, rows or context never takes less time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Optional

from servesim.core import Shape, StepCost

from .curves import Points, interpolate


@dataclass(frozen=True)
class PrefillPart:
    """Seconds of the prompt chunks of a step."""

    tokens: Points = ((1.0, 0.0),)  # curve over the padded tokens of the step; it includes the fixed time of a step
    row: float = 0.0  # per prompt chunk
    square: float = 0.0  # per squared token of a chunk: attention within the chunk
    cross: float = 0.0  # per token of a chunk x token cached before it: attention before the chunk
    cross_root: float = 0.0  # per square root of it: short chunks read the cached tokens less efficiently
    paged_square: float = 0.0  # in addition to `square` with cached tokens: the kernel that reads them is slower
    buckets: Sequence[int] = ()  # padding buckets of the tokens; larger steps are not padded

    def seconds(self, rows: int, tokens: int, squares: int, cross: int) -> float:
        if self.buckets and tokens <= self.buckets[-1]:
            tokens = self.buckets[bisect_left(self.buckets, tokens)]
        seconds = interpolate(self.tokens, tokens) + self.row * rows + self.square * squares
        if cross:
            seconds += self.cross * cross + self.cross_root * sqrt(cross) + self.paged_square * squares
        return seconds


@dataclass(frozen=True)
class DecodePart:
    """Seconds of the decodes of a step."""

    rows: Sequence[Sequence[float]] = ((1.0, 0.0),)  # (padded rows, seconds, optionally seconds per cached token)
    live: float = 0.0  # per row that is not padding
    context: float = 0.0  # per cached token that is read, for all rows
    context_root: float = 0.0  # per square root of them: short contexts are read less efficiently
    rounded: bool = False  # rows are padded to the next point of the curve

    def terms(self, rows: int) -> tuple[float, float, float]:
        """Return the fixed seconds, the seconds per live row and the seconds per cached token."""
        points = self.rows
        if self.rounded:
            rows = next((int(point[0]) for point in points if point[0] >= rows), rows)
        fixed = interpolate([(point[0], point[1]) for point in points], rows)
        token = interpolate([(point[0], point[2] if len(point) > 2 else 0.0) for point in points], rows)
        return fixed, self.live, token + self.context


@dataclass(frozen=True)
class MixedPart:
    """Seconds of a step with prompts and decodes.

    With `one_pass`, the decodes join the prompt tokens in one model call; further terms are for their attention.
    Otherwise the two parts run next to each other: the shorter one is hidden by the fraction `overlap`.
    """

    one_pass: bool = True
    step: float = 0.0  # one pass: per mixed step
    row: float = 0.0  # one pass: per decode row
    context: float = 0.0  # one pass: per cached token that the decodes read
    overlap: float = 0.0  # two parts: 0 to 1
    floor: bool = True  # one pass: a mixed step takes at least as long as its decodes alone


@dataclass(frozen=True)
class SwapPart:
    """Seconds of block copies to and from the host."""

    step: float = 0.0  # per step with copies
    block: float = 0.0


@dataclass(frozen=True)
class HostPart:
    """Seconds of host work around the model call: scheduling, building rows, reading results."""

    step: float = 0.0
    row: float = 0.0  # per row, prompt or decode
    prompt: float = 0.0  # per prompt chunk, in addition to its row
    token: float = 0.0  # per prompt token


@dataclass(frozen=True)
class PartsCost(StepCost):
    """The sum of the parts that a step has."""

    prefill: PrefillPart = PrefillPart()
    decodes: DecodePart = DecodePart()
    mixed: MixedPart = MixedPart()
    swap: SwapPart = SwapPart()
    host: HostPart = HostPart()
    _terms: dict[int, tuple[float, float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, shape: Shape) -> float:
        seconds = self.swap.step + self.swap.block * shape.swapped if shape.swapped else 0.0
        if not shape.prefill_rows:
            if not shape.decode_rows:
                return seconds + self.host.step
            return seconds + self.decode(shape.decode_rows, shape.decode_live, shape.context)
        host, rows = self.host, shape.prefill_rows
        seconds += host.step + host.row * (rows + shape.decode_live) + host.prompt * rows
        seconds += host.token * shape.prefill_live
        if shape.decode_rows:
            return seconds + self._mixed(shape)
        return seconds + self.prefill.seconds(rows, shape.prefill_tokens, shape.squares, shape.cross)

    def decode(self, rows: int, live: int, context: int) -> float:
        fixed, slope = self._line(rows, live)
        root = self.decodes.context_root
        return fixed + slope * context + root * sqrt(context) if root else fixed + slope * context

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        return None if self.decodes.context_root else self._line(rows, live)

    def _line(self, rows: int, live: int) -> tuple[float, float]:
        terms = self._terms.get(rows)
        if terms is None:
            fixed, row, token = self.decodes.terms(rows)
            terms = self._terms[rows] = (fixed + self.host.step, row + self.host.row, token)
        return terms[0] + terms[1] * live, terms[2]

    def _mixed(self, shape: Shape) -> float:
        """Return the seconds of prompts and decodes of one step, without host time."""
        part, rows, live = self.mixed, shape.decode_rows, shape.decode_live
        decode = self.decode(rows, live, shape.context) - self.host.step - self.host.row * live
        tokens = shape.prefill_tokens + rows if part.one_pass else shape.prefill_tokens
        prefill = self.prefill.seconds(shape.prefill_rows, tokens, shape.squares, shape.cross)
        if part.one_pass:
            seconds = prefill + part.step + part.row * rows + part.context * shape.context
            return decode if part.floor and decode > seconds else seconds
        return prefill + decode - part.overlap * min(prefill, decode)
