"""One model call: what it computes, what it is called, and the gaps between tokens that calls leave behind."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

from servesim.core import Chunk, Plan, Request, Shape


class Step:
    """One model call between its begin and its end, or a turn that moved requests and calls nothing."""

    __slots__ = (
        "admitted", "chunks", "context", "decoders", "evicted", "hold", "moved", "plan", "skipped", "start", "swapped",
    )  # fmt: skip

    def __init__(self, plan: Plan, start: float) -> None:
        self.plan = plan
        self.start = start
        self.chunks: Sequence[Chunk] = ()  # the prompt parts
        self.decoders = 0
        self.context = 0  # tokens the decoders read
        self.skipped: Sequence[Request] = ()  # decoding requests that do not run in this step
        self.swapped = 0  # blocks copied
        self.hold = 0  # further steps for which it may be repeated: all decode, and nothing else happens
        self.moved = False
        self.admitted: list[tuple[Request, Optional[int]]] = []  # with the slot each took; only for observers
        self.evicted: list[tuple[Request, str, Optional[int]]] = []  # how, and the slot each left; only for observers

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
        return "reject" if self.plan.moves.reject else "idle"


class ModelCall(NamedTuple):
    """One measured model call: when its step began, when the backend was called, when it ended, and its shape."""

    start: float
    called: float
    end: float
    shape: Shape

    def flat(self) -> list[float]:
        """Return it as one list of numbers, a row of steps.csv."""
        return [self.start, self.called, self.end, *self.shape]


def model_call(row: Sequence[Any]) -> ModelCall:
    """Return a call from its list of numbers."""
    return ModelCall(float(row[0]), float(row[1]), float(row[2]), Shape(*map(int, row[3:])))


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


def batch(running: Iterable[Request], step: Step) -> list[tuple[Any, int]]:
    """Return a step's batch in order, as (id, tokens); asked between its begin and its end."""
    chunks = [(chunk.request.id, chunk.tokens) for chunk in step.plan.chunks]
    if not step.plan.decode:
        return chunks
    starting = {chunk.request for chunk in step.chunks}
    decodes = [(request.id, 1) for request in running if request.decodes and request not in starting]
    return decodes + chunks if step.plan.decode_first else chunks + decodes
