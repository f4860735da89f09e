"""A cost model in parts: prefill, decode, mixed steps, swaps and host time.

All numbers are at least 0 and all curves rise, so a step with more tokens, rows or context never takes less time. Only
`padded_square` falls with more rows for the same padded tokens: these rows are shorter.

A step that verifies drafts is predicted from steps without them. The drafts are further tokens of the layers, as
decodes are that join prompts. Rows with drafts are short prompt chunks: they read their cached tokens once, in the
kernel of chunks. If the attention of a chunk after as many cached tokens takes longer, this time counts. If all rows
have drafts, a mixed step has no further kernel of decodes, so it may take less time than without drafts. With a fitted
`decode.draft`, each draft takes this time in a decode step, and the time of a token in a mixed step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import sqrt
from typing import Any, Optional

from servesim.core import Shape, StepCost

Points = Sequence[tuple[float, float]]
INFINITY = float("inf")
CHUNK_READ = 1.4  # times the seconds of a decode, to read a cached token in a chunk of few tokens: H200, 64 to 128 rows


def interpolate(points: Points, x: float) -> float:
    """Interpolate a curve linearly; extrapolate from its first or last two points, but never to a negative value.

    Below the first point, the line must not fall faster than in proportion to x. Above the last point, it must not
    fall at all: more work never takes less time than the largest measured amount.
    """
    last = len(points) - 1
    if not last:
        return points[0][1]
    index = bisect_right(points, (x, INFINITY))
    inside = 0 < index <= last
    right = index if inside else 1 if not index else last
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    floor = 0.0 if inside else y0 * x / x0 if not index else min(y0, y1)
    return y if y > floor else floor


class Part:
    """Base of the parts. They are copied and pickled through the constructor: compiled frozen fields cannot be set."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), field_values(self)


def field_values(instance: Any) -> tuple[Any, ...]:
    """Return the arguments of a dataclass's constructor that make an equal object."""
    return tuple(getattr(instance, f.name) for f in fields(instance) if f.init)


@dataclass(frozen=True)
class PrefillPart(Part):
    """Seconds of the prompt chunks of a step."""

    tokens: Points = ((1.0, 0.0),)  # curve over the padded tokens of the step; it includes the fixed time of a step
    row: float = 0.0  # per prompt chunk
    square: float = 0.0  # per squared token of a chunk: attention within the chunk
    cross: float = 0.0  # per token of a chunk x token cached before it: attention before the chunk
    cross_root: float = 0.0  # per square root of it: short chunks read the cached tokens less efficiently
    paged_square: float = 0.0  # in addition to `square` with cached tokens: the kernel that reads them is slower
    padded_square: float = 0.0  # per (padded tokens)^2 / rows: attention of equally padded rows
    buckets: Sequence[int] = ()  # padding buckets of the tokens; larger steps are not padded
    width: int = 0  # fewer tokens than this need as long for the tokens cached before them: they do not fill the device
    width_power: Optional[float] = None  # of width / tokens; below 1, fewer tokens need a little less time

    def layers(self, tokens: int) -> float:
        """Return the seconds of a step with these tokens without attention."""
        if self.buckets and tokens <= self.buckets[-1]:
            tokens = self.buckets[bisect_left(self.buckets, tokens)]
        return interpolate(self.tokens, tokens)

    def cached(self, cross: float, tokens: float, width: int) -> float:
        """Return the seconds of attention to the tokens cached before the chunks."""
        wide = cross * width / tokens
        if wide > cross and self.width_power is not None:
            wide = cross * (width / tokens) ** self.width_power
        return self.cross * (wide if wide > cross else cross) + self.cross_root * sqrt(cross)

    def seconds(self, shape: Shape, joined: int = 0) -> float:
        """Return the seconds of the prompts of a step; `joined` decodes count as further tokens."""
        rows, layers = shape.prefill_rows, self.layers(shape.prefill_tokens + joined)
        seconds = layers + self.row * rows + self.square * shape.squares
        if shape.cross:
            seconds += self.cached(shape.cross, shape.prefill_tokens, self.width)
            seconds += self.paged_square * shape.squares
        if self.padded_square:
            seconds += self.padded_square * shape.prefill_tokens**2 / rows
        return seconds


@dataclass(frozen=True)
class DecodePart(Part):
    """Seconds of the decodes of a step."""

    rows: Sequence[Sequence[float]] = ((1.0, 0.0),)  # (padded rows, seconds, optionally seconds per cached token)
    live: float = 0.0  # per row that is not padding
    context: float = 0.0  # per cached token that is read, for all rows
    context_root: float = 0.0  # per square root of them: short contexts are read less efficiently
    buckets: Sequence[int] = ()  # padding buckets of the rows; larger steps are not padded
    context_step: int = 0  # the engine reads cached tokens in multiples of this; 0: as many as there are
    longest: Optional[float] = None  # per cached token of the row with most of them: its parts are merged one by one
    split: bool = False  # rows with drafts read contexts in parts, as other rows do: in the same time
    draft: Optional[float] = None  # per draft, if it is fitted to steps with drafts

    def tokens_read(self, context: int) -> int:
        """Return the tokens that a step reads for these cached tokens."""
        return -(-context // self.context_step) * self.context_step if self.context_step else context

    def longest_row(self, live: int, context: int, longest: int) -> float:
        """Return the seconds of the longest context; without it, all rows are equally long."""
        if self.longest is None or not live:
            return 0.0
        return self.longest * (longest or context / live)

    def terms(self, rows: int) -> tuple[float, float, float]:
        """Return the fixed seconds, the seconds per live row and the seconds per cached token."""
        points = self.rows
        if self.buckets and rows <= self.buckets[-1]:
            rows = self.buckets[bisect_left(self.buckets, rows)]
        fixed = interpolate([(point[0], point[1]) for point in points], rows)
        token = interpolate([(point[0], point[2] if len(point) > 2 else 0.0) for point in points], rows)
        return fixed, self.live, token + self.context


@dataclass(frozen=True)
class MixedPart(Part):
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
class SwapPart(Part):
    """Seconds of block copies to and from the host."""

    step: float = 0.0  # per step with copies
    block: float = 0.0


@dataclass(frozen=True)
class HostPart(Part):
    """Seconds of host work around the model call: scheduling, building rows, reading results."""

    step: float = 0.0
    row: float = 0.0  # per row, prompt or decode
    prompt: float = 0.0  # per prompt chunk, in addition to its row
    token: float = 0.0  # per prompt token

    def seconds(self, rows: int, prompts: int = 0, tokens: int = 0) -> float:
        """Return the host time of a step; `tokens` are the prompt tokens of all its chunks."""
        return self.step + self.row * rows + self.prompt * prompts + self.token * tokens

    def of_step(self, shape: Shape) -> float:
        """Return the host time of a step."""
        return self.seconds(shape.prefill_rows + shape.decode_live, shape.prefill_rows, shape.prefill_live)


NO_HOST = HostPart()
PART_FIELDS = {  # name of a part in a profile: field of PartsCost
    "prefill": "prefill", "decode": "decodes", "mixed": "mixed", "swap": "swap", "host": "host",
}  # fmt: skip


@dataclass(frozen=True)
class PartsCost(StepCost):
    """The sum of the parts that a step has."""

    prefill: PrefillPart = PrefillPart()
    decodes: DecodePart = DecodePart()
    mixed: MixedPart = MixedPart()
    swap: SwapPart = SwapPart()
    host: HostPart = NO_HOST
    # Every step of a run asks for these: the terms of decodes by rows, and layers by tokens of rows with drafts.
    _terms: dict[int, tuple[float, float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _layers: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), field_values(self)

    def seconds(self, shape: Shape) -> float:
        seconds = self.swap.step + self.swap.block * shape.swapped if shape.swapped else 0.0
        if not shape.prefill_rows:
            if not shape.decode_rows:
                return seconds + self.host.step
            return seconds + self._decodes(shape)
        host, rows = self.host, shape.prefill_rows
        seconds += host.step + host.row * (rows + shape.decode_live) + host.prompt * rows
        seconds += host.token * shape.prefill_live
        if shape.decode_rows:
            return seconds + self._mixed(shape)
        return seconds + self.prefill.seconds(shape)

    @property
    def reads_longest(self) -> bool:
        return self.decodes.longest is not None

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.decode_unequal(rows, live, context, 0)

    def decode_unequal(self, rows: int, live: int, context: int, longest: int) -> float:
        part = self.decodes
        fixed, slope = self._line(rows, live)
        if part.longest is not None:
            fixed += part.longest_row(live, context, longest)
        root = part.context_root
        if part.context_step:
            context = part.tokens_read(context)
        return fixed + slope * context + root * sqrt(context) if root else fixed + slope * context

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        part = self.decodes
        return None if part.context_root or part.context_step or self.reads_longest else self._line(rows, live)

    def _decodes(self, shape: Shape) -> float:
        """Return the seconds of the decodes of a step, with the drafts that they verify."""
        rows = shape.decode_rows
        seconds = self.decode_unequal(rows, shape.decode_live, shape.context, shape.longest)
        if shape.drafts and self.decodes.draft is not None:
            seconds += self.decodes.draft * shape.drafts
        elif shape.drafts:
            fixed, _, token = self._terms_of(rows)
            seconds += max(0.0, self._layers_of(rows + shape.drafts) - fixed)
            seconds += self._attention_of_drafts(shape, token)
        return seconds

    def _attention_of_drafts(self, shape: Shape, read: float) -> float:
        """Return by how much the attention takes longer than reading the cached tokens, `read` seconds for each."""
        if not shape.drafts or self.decodes.draft is not None:
            return 0.0
        part, tokens = self.prefill, shape.decode_rows + shape.drafts
        queries, reading = tokens / shape.decode_rows, read * shape.context
        if self.decodes.split:
            return max(0.0, part.cached(queries * shape.context, tokens, 0) - reading)
        attention = part.cached(queries * shape.context, shape.prefill_tokens + tokens, part.width)
        if shape.longest and not shape.prefill_rows:  # a row that is not split takes its time, whatever the others have
            attention = max(attention, part.cached(queries * shape.longest, queries, part.width))
        return max(attention, CHUNK_READ * reading) - reading

    def _line(self, rows: int, live: int) -> tuple[float, float]:
        fixed, row, token = self._terms_of(rows)
        return fixed + self.host.step + (row + self.host.row) * live, token

    def _terms_of(self, rows: int) -> tuple[float, float, float]:
        terms = self._terms.get(rows)
        if terms is None:
            terms = self._terms[rows] = self.decodes.terms(rows)
        return terms

    def _layers_of(self, tokens: int) -> float:
        seconds = self._layers.get(tokens)
        if seconds is None:
            seconds = self._layers[tokens] = self.prefill.layers(tokens)
        return seconds

    def _mixed(self, shape: Shape) -> float:
        """Return the seconds of prompts and decodes of one step, without host time."""
        part, rows, live = self.mixed, shape.decode_rows, shape.decode_live
        decode = self._decodes(shape) - self.host.step - self.host.row * live
        prefill = self.prefill.seconds(shape, rows + shape.drafts if part.one_pass else 0)
        if part.one_pass:
            step = part.step if shape.drafts < rows else 0.0
            seconds = prefill + step + part.row * rows + part.context * self.decodes.tokens_read(shape.context)
            seconds += self._attention_of_drafts(shape, part.context)
            if self.decodes.longest is not None:
                seconds += self.decodes.longest_row(live, shape.context, shape.longest)
            return decode if part.floor and decode > seconds else seconds
        return prefill + decode - part.overlap * min(prefill, decode)
