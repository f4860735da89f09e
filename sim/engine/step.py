"""One step of the scheduler, and the gaps between tokens."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, Optional

from servesim.core import Chunk, Plan, Request

MAX_NEW_GAPS: Final = 4096  # token gaps that are not packed yet
# Never changed: a list per field and step would take time.
NO_REQUESTS: Final[list[Request]] = []
NO_CHUNKS: Final[list[Chunk]] = []


class Verified:
    """A row of a request whose step may return several tokens (speculative decoding)."""

    __slots__ = ("accepted", "decodes", "drafts", "request")

    def __init__(self, request: Request, drafts: int, accepted: int, decodes: bool) -> None:
        self.request = request
        self.drafts = drafts
        self.accepted = accepted  # the first ones of them; UNKNOWN: the step has not returned
        self.decodes = decodes  # otherwise it completes a prompt


NO_ROWS: Final[list[Verified]] = []


class Step:
    """One step: a plan that has been carried out, its model call if it has one, and what the call will return."""

    __slots__ = (
        "admitted", "before", "chunks", "context", "copied_blocks", "decided", "decode_chunks", "decode_rows", "drafts",
        "empty", "end", "ends", "fails", "has_moves", "joined", "left", "longest", "paused",
        "plan", "preempted", "requests", "rows", "sampled", "shared_copies", "start", "verified",
    )  # fmt: skip

    def __init__(self, plan: Plan, decided: float, start: float) -> None:
        self.plan = plan
        self.decided = decided  # when the scheduler made the plan
        self.start = start  # of the model call; later than the decision if the step before it was still running
        self.chunks = NO_CHUNKS  # of the plan, without those of decoding requests
        self.decode_chunks = 0  # chunks that are decodes with drafts
        self.decode_rows = 0  # live rows
        self.drafts = 0  # that these verify
        self.context = 0  # cached tokens that the decoding rows read
        self.longest = 0  # those of the row with most of them; 0 if no cost model needs it
        self.paused: Sequence[Request] = ()  # decoding requests that do not run in this step
        self.copied_blocks = 0  # to and from the host
        self.shared_copies = 0  # blocks that several sequences of a request held, copied before one writes into it
        self.has_moves = False
        # For observers only: (request, its new slot), and (request, mode, its old slot).
        self.admitted: Sequence[tuple[Request, Optional[int]]] = ()
        self.preempted: Sequence[tuple[Request, str, Optional[int]]] = ()
        # What its model call returns, from its launch on (model_call.py).
        self.end = start  # when it returns
        self.before: Optional[Step] = None  # the step before it that is still in flight
        self.empty = 0  # decisions since then without a model call: they keep their places among the steps in flight
        self.rows = 0  # decode rows whose token will count
        self.joined = NO_REQUESTS  # rows that decode for the first time since they joined the cohort
        self.sampled = NO_REQUESTS  # requests whose prompt it completes
        self.verified = NO_ROWS  # requests that may get several tokens (speculative decoding)
        self.ends = NO_REQUESTS  # requests that get their last token
        self.left = NO_REQUESTS  # rows that have left the cohort since then
        self.fails = False  # the model call fails; then `requests` has all its rows
        self.requests = NO_REQUESTS

    @property
    def runs_model(self) -> bool:
        """Whether the step runs the model or copies blocks."""
        return bool(self.decode_rows or self.chunks or self.plan.padding_rows or self.copied_blocks)

    @property
    def kind(self) -> str:
        """The kind of step: prefill, decode, mixed, swap, reject or idle."""
        if len(self.chunks) > self.decode_chunks:
            return "mixed" if self.decode_rows or self.decode_chunks else "prefill"
        if self.decode_rows or self.decode_chunks:
            return "decode"
        if self.plan.padding_rows:
            return "prefill"
        if self.copied_blocks:
            return "swap"
        return "reject" if self.plan.moves.reject else "idle"

    def note_left(self, request: Request) -> None:
        """Note that a row has left the cohort."""
        if self.left:
            self.left.append(request)
        else:
            self.left = [request]

    def note_end(self, request: Request) -> None:
        """Note that it returns the last token of a request."""
        if self.ends:
            self.ends.append(request)
        else:
            self.ends = [request]

    def note_row(self, row: Verified) -> None:
        """Note what it returns for a request with drafts."""
        if self.verified:
            self.verified.append(row)
        else:
            self.verified = [row]

    def computes(self, request: Request) -> bool:
        """Whether a request that has left the cohort is part of the model call."""
        if request in self.left or any(row.request is request for row in self.verified):
            return True
        return any(chunk.request is request for chunk in self.chunks)

    def drop(self, request: Request) -> int:
        """Throw away the token of a request. Return how many drafts were verified with it."""
        cohort, drafts = request._cohort, 0
        if self.verified:
            for row in self.verified[:]:
                if row.request is request:
                    request._in_flight -= 1 + row.drafts
                    request._written -= 1 + row.drafts
                    drafts += row.drafts
                    self.verified.remove(row)
        elif request in self.sampled:
            self.sampled.remove(request)
            request._in_flight = 0
            request._written -= 1
        else:
            self.rows -= 1
            if request in self.joined:
                self.joined.remove(request)
            if cohort is None:
                self.left.remove(request)
                request._in_flight = 0
                request._written -= 1
            else:  # its tokens are counted from a later step, and it keeps its cached ones
                request._joined_step += 1
                request._cached += 1
        if request in self.ends:
            self.ends.remove(request)
        return drafts


class TokenGaps:
    """Seconds between two tokens of a request (inter-token latencies), pooled over all requests.

    A gap is stored once with the number of requests that saw it.
    """

    __slots__ = ("_counts", "_new_counts", "_new_seconds", "_seconds")

    def __init__(self) -> None:
        self._seconds = array("d")
        self._counts = array("i")
        self._new_seconds: list[float] = []  # a list is faster to append to, an array is smaller
        self._new_counts: list[int] = []

    @property
    def seconds(self) -> array[float]:
        """The gaps."""
        self._pack()
        return self._seconds

    @property
    def counts(self) -> array[int]:
        """The number of requests that saw each gap."""
        self._pack()
        return self._counts

    def add(self, seconds: float, count: int) -> None:
        """Add a gap that `count` requests saw."""
        self._new_seconds.append(seconds)
        self._new_counts.append(count)
        if len(self._new_counts) == MAX_NEW_GAPS:
            self._pack()

    def _pack(self) -> None:
        count = len(self._new_counts)  # `struct` converts several times faster than `array.extend`
        self._seconds.frombytes(struct.pack(f"{count}d", *self._new_seconds))
        self._counts.frombytes(struct.pack(f"{count}i", *self._new_counts))
        self._new_seconds.clear()
        self._new_counts.clear()


def readmitted_as_decode(request: Request) -> bool:
    """Whether a recomputed request counts as a decoding one, because its first sequence has ended."""
    group = request.group
    return group is not None and group.first_ended and request._cohort is None


def batch(running: Iterable[Request], step: Step) -> list[tuple[Any, int]]:
    """Return the batch of a step in order, as (id, tokens). Call it before the step ends."""
    chunks = [
        (chunk.request.id, 1 if readmitted_as_decode(chunk.request) else chunk.tokens) for chunk in step.plan.chunks
    ]
    if not step.plan.decode:
        return chunks
    prefills = {chunk.request for chunk in step.chunks}
    decodes = [
        (request.id, request.sequences * cohort.width)
        for request in running
        if (cohort := request._cohort) is not None and request not in prefills
    ]
    return decodes + chunks if step.plan.decode_first else chunks + decodes
