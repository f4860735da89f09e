"""One model call: what it computes, what it is called, and the gaps between tokens that calls leave behind."""

from __future__ import annotations

from array import array
from typing import Any, Optional, Sequence

from .core import Chunk, Plan, Request


class Step:
    """One model call between its begin and its end, or a turn that moved requests and calls nothing."""

    __slots__ = ("admitted", "chunks", "context", "decoders", "evicted", "kind", "moved", "plan", "skipped", "start", "swapped")

    def __init__(self, plan: Plan, start: float) -> None:
        self.plan = plan
        self.start = start
        self.chunks: list[Chunk] = []  # the prompt parts
        self.decoders = 0
        self.context = 0  # tokens the decoders read
        self.skipped: list[Request] = []  # decoding requests that sit this step out
        self.swapped = 0
        self.admitted: list[tuple[Request, Optional[int]]] = []  # and the slot each took
        self.evicted: list[tuple[Request, str, Optional[int]]] = []  # how, and the slot each left
        self.moved = False
        self.kind = "idle"  # prefill | decode | mixed | swap | reject | idle

    @property
    def calls(self) -> bool:
        """Whether the model runs."""
        return bool(self.chunks or self.decoders or self.plan.padding or self.swapped)


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


def kind_of(step: Step) -> str:
    """Name what a step does."""
    if step.chunks:
        return "mixed" if step.decoders else "prefill"
    if step.decoders:
        return "decode"
    if step.plan.padding:
        return "prefill"
    if step.swapped:
        return "swap"
    return "reject" if step.plan.reject else "idle"


def batch(running: Sequence[Request], step: Step) -> list[tuple[Any, int]]:
    """Return a step's batch in order, as (id, tokens); asked between its begin and its end."""
    chunks = [(chunk.request.id, chunk.tokens) for chunk in step.plan.chunks]
    if not step.plan.decode:
        return chunks
    starting = {chunk.request for chunk in step.chunks}
    decodes = [(request.id, 1) for request in running if request.decodes and request not in starting]
    return decodes + chunks if step.plan.decode_first else chunks + decodes
