"""One request: what was asked, how far it is, and where its seconds went. Lengths are tokens, times are seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Protocol

# What a client asks: the arguments of Request, in order.
ASKED = ("id", "arrival", "prompt", "output", "limit", "priority", "session", "prefix", "after", "delay", "fails")


class DecodeCohort(Protocol):
    """The decoding requests of a server, as a request and a policy see them (sim/engine/cohort.py)."""

    size: int
    context: int  # sum of their cached tokens
    ticks: int  # decode steps of all of them so far

    def need(self, ahead: int = 0) -> int: ...  # blocks that the next decode step takes, or a later one

    def blocks(self, request: Request) -> int: ...  # device blocks that one of them holds


class ClientRequest:
    """What a client asks: one prompt, the tokens it may get, and when. A trace is a list of these."""

    __slots__ = ASKED

    def __init__(
        self,
        id: Any,
        arrival: float,
        prompt: int,
        output: int,
        limit: Optional[int] = None,
        priority: int = 0,
        session: Optional[str] = None,
        prefix: Sequence[int] = (),
        after: Any = None,
        delay: float = 0.0,
        fails: Optional[int] = None,
    ) -> None:
        self.id = id
        self.arrival = arrival
        self.prompt = prompt
        self.output = output  # tokens it will get, end-of-sequence included; a policy may not read it
        self.limit = output if limit is None else limit  # tokens it may get (max_new_tokens)
        self.priority = priority  # smaller is served first
        self.session = session
        self.prefix = prefix  # hash ids of its prompt's blocks, as in Mooncake traces
        self.after = after  # id of the request whose end it waits for (sessions, closed loops)
        self.delay = delay  # seconds from that end to its own arrival
        self.fails = fails  # the model call that would generate this token fails

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.arrival:g} s, {self.prompt}+{self.output})"


class Request(ClientRequest):
    """A request in a server: what was asked, its progress, and when things happened to it.

    While it decodes with its cohort, `cached` and `written` follow the cohort's steps instead of being stored.
    """

    __slots__ = (
        "serial", "place", "slot", "end", "host", "complete", "evictions", "outcome", "reason",
        "visible", "scheduled", "first_token", "last_token", "finish", "seen",
        "queued", "prefilling", "decoding", "swapped", "since",
        "_written", "_cached", "_held", "_cohort", "_joined", "_due", "_busy", "_listed",
    )  # fmt: skip
    _joined: int  # these three are its cohort's
    _due: int
    _busy: float

    def __init__(
        self,
        id: Any,
        arrival: float,
        prompt: int,
        output: int,
        limit: Optional[int] = None,
        priority: int = 0,
        session: Optional[str] = None,
        prefix: Sequence[int] = (),
        after: Any = None,
        delay: float = 0.0,
        fails: Optional[int] = None,
    ) -> None:
        super().__init__(id, arrival, prompt, output, limit, priority, session, prefix, after, delay, fails)
        self.serial = 0  # rank of submission, the last tie-break
        self.place = "outside"  # outside | waiting | running | swapped | done
        self.slot: Optional[int] = None  # its row in an engine of fixed slots
        # tokens after which it is over; the server may cap it
        self.end = output if limit is None or output < limit else limit
        self.host = 0  # blocks it holds in host memory
        self.complete = False  # its prompt was complete when it was swapped out: it decodes when it comes back
        self.evictions = 0
        self.outcome: Optional[str] = None  # finished | refused | failed | unanswered | lost | aborted
        self.reason: Optional[str] = None
        self.visible: Optional[float] = None  # when the scheduler could first see it
        self.scheduled: Optional[float] = None  # start of its first step
        self.first_token: Optional[float] = None
        self.last_token: Optional[float] = None
        self.finish: Optional[float] = None  # when the engine was done with it
        self.seen: Optional[float] = None  # when the client saw the end
        self.queued = 0.0
        self.prefilling = 0.0
        self.decoding = 0.0
        self.swapped = 0.0
        self.since = arrival  # when it entered the state it is in
        self._written = 0
        self._cached = 0
        self._held = 0
        self._cohort: Optional[DecodeCohort] = None
        self._listed = False  # among its server's prefilling

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.place}, {self.prompt}+{self.written}, cached {self.cached})"

    @property
    def written(self) -> int:
        """Tokens of the answer so far."""
        cohort = self._cohort
        return self._written if cohort is None else self._written + cohort.ticks - self._joined

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in device or host memory."""
        cohort = self._cohort
        return self._cached if cohort is None else self._cached + cohort.ticks - self._joined

    @property
    def length(self) -> int:
        """Prompt and answer so far."""
        return self.prompt + self.written

    @property
    def pending(self) -> int:
        """Tokens to compute before it can write the next one: the rest of its prompt, or 1."""
        return self.prompt + self.written - self.cached

    @property
    def blocks(self) -> int:
        """Device blocks it holds."""
        cohort = self._cohort
        return self._held if cohort is None else cohort.blocks(self)

    @property
    def decodes(self) -> bool:
        """Whether its prompt is complete and it now writes a token a step."""
        return self._cohort is not None
