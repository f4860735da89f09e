"""One model call: what it computes, what it is called, and the gaps between tokens that calls leave behind."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Optional

from servesim.core import Chunk, Plan, Request


class Step:
    """One model call between its begin and its end, or a turn that moved requests and calls nothing."""

    # What most calls leave as it is stands here, once: a call is made for every iteration.
    chunks: Sequence[Chunk] = ()  # the prompt parts
    decoders = 0
    context = 0  # tokens the decoders read
    skipped: Sequence[Request] = ()  # decoding requests that sit this step out
    swapped = 0  # blocks copied
    hold = 0  # further iterations for which it may be repeated: everybody decodes, and nothing else
    moved = False
    admitted: Sequence[tuple[Request, Optional[int]]] = ()  # and the slot each took; like the next, only if recorded
    evicted: Sequence[tuple[Request, str, Optional[int]]] = ()  # how, and the slot each left

    def __init__(self, plan: Plan, start: float) -> None:
        self.plan = plan
        self.start = start

    @property
    def calls(self) -> bool:
        """Whether the model runs."""
        return bool(self.decoders or self.chunks or self.plan.padding or self.swapped)

    @property
    def kind(self) -> str:
        """Name what it does: prefill, decode, mixed, swap, reject or idle."""
        if self.chunks:
            return "mixed" if self.decoders else "prefill"
        if self.decoders:
            return "decode"
        if self.plan.padding:
            return "prefill"
        if self.swapped:
            return "swap"
        return "reject" if self.plan.reject else "idle"


class Gaps:
    """Times between a request's tokens, pooled over all requests: a value and how many saw it.

    Those of a long leap lie on a line and are kept as that: so many of a + b * (context + k * live), k = 1, 2...,
    each seen by `live` requests.
    """

    __slots__ = ("lines", "seconds", "seen")

    def __init__(self) -> None:
        self.seconds = array("d")
        self.seen = array("l")
        self.lines = array("d")  # five numbers each: a, b, context, live, how many

    @property
    def total(self) -> int:
        """Return how many gaps there were."""
        return sum(self.seen) + int(sum(live * count for live, count in zip(self.lines[3::5], self.lines[4::5])))

    def add(self, seconds: float, seen: int) -> None:
        """Count a gap that so many requests saw."""
        if seen:
            self.seconds.append(seconds)
            self.seen.append(seen)

    def add_line(self, fixed: float, slope: float, context: int, live: int, count: int) -> None:
        """Count so many gaps of a leap that so many requests saw."""
        self.lines.extend((fixed, slope, context, live, count))


def batch(running: Sequence[Request], step: Step) -> list[tuple[Any, int]]:
    """Return a step's batch in order, as (id, tokens); asked between its begin and its end."""
    chunks = [(chunk.request.id, chunk.tokens) for chunk in step.plan.chunks]
    if not step.plan.decode:
        return chunks
    starting = {chunk.request for chunk in step.chunks}
    decodes = [(request.id, 1) for request in running if request.decodes and request not in starting]
    return decodes + chunks if step.plan.decode_first else chunks + decodes
