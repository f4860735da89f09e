"""One model call: what it computes, what it is called, and the gaps between tokens that calls leave behind."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Optional

from .core import Chunk, Plan, Request


class Step:
    """One model call between its begin and its end, or a turn that moved requests and calls nothing."""

    chunks: Sequence[Chunk] = ()  # the prompt parts
    decoders = 0
    context = 0  # tokens the decoders read
    skipped: Sequence[Request] = ()  # decoding requests that sit this step out
    swapped = 0  # blocks copied
    moved = False
    admitted: Sequence[tuple[Request, Optional[int]]] = ()  # and the slot each took
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
    """Times between a request's tokens, pooled over all requests: a value and how many saw it."""

    __slots__ = ("seconds", "seen")

    def __init__(self) -> None:
        self.seconds = array("d")
        self.seen = array("l")

    def add(self, seconds: float, seen: int) -> None:
        """Count a gap that so many requests saw."""
        if seen:
            self.seconds.append(seconds)
            self.seen.append(seen)

    def extend(self, seconds: Sequence[float], seen: int) -> None:
        """Count several gaps that the same number of requests saw."""
        self.seconds.extend(seconds)
        self.seen.extend([seen] * len(seconds))


def batch(running: Sequence[Request], step: Step) -> list[tuple[Any, int]]:
    """Return a step's batch in order, as (id, tokens); asked between its begin and its end."""
    chunks = [(chunk.request.id, chunk.tokens) for chunk in step.plan.chunks]
    if not step.plan.decode:
        return chunks
    starting = {chunk.request for chunk in step.chunks}
    decodes = [(request.id, 1) for request in running if request.decodes and request not in starting]
    return decodes + chunks if step.plan.decode_first else chunks + decodes
