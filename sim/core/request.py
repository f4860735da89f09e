"""One request: what the client asks, and its progress in a server. Lengths are tokens, times are seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from .content import Content
from .sampling import Sampling, SequenceGroup

if TYPE_CHECKING:
    from mypy_extensions import i64  # of a number that is never larger: faster in compiled code

# What a client asks: the arguments of ClientRequest, in order.
CLIENT_FIELDS = (
    "id", "arrival", "prompt", "output", "limit", "priority", "session", "content", "follows", "think_time",
    "fails_at_token", "sampling", "acceptance",
)  # fmt: skip
# Its progress in a server: the other attributes of Request.
PROGRESS_FIELDS = (
    "sent", "serial", "status", "slot", "max_tokens", "stop_at", "host_blocks", "prompt_done", "preemptions",
    "cached_tokens", "outcome", "reason", "visible_at", "received", "scheduled", "first_token", "last_token", "finish",
    "client_end", "queued", "prefilling", "decoding", "swapped", "state_since",
    "_written", "_cached", "_blocks", "_cohort", "_joined_step", "_finish_step", "_joined_busy_s",
    "_covered", "_grown", "_grown_at", "_in_prefilling", "_in_flight", "_admission", "drafts", "luck", "drafted",
    "accepted", "named",
)  # fmt: skip


class DecodeCohort:
    """The decoding requests of a server, as requests and policies see them. The engine has the rest in `Cohort`."""

    __slots__ = ("context", "groups", "in_flight", "max_length", "size", "steps", "width")

    def __init__(self) -> None:
        self.size = 0  # sequences: most requests have one
        self.context = 0  # sum of their cached tokens
        self.max_length = 0  # sum of their prompts and output limits
        self.groups: list[Request] = []  # those with several sequences
        self.steps = 0  # decode steps of the cohort so far
        self.in_flight = 0  # of these, steps that have not returned; always 0 if the engine waits for each step
        self.width = 1  # tokens of a sequence in a step; more with drafts

    def blocks_needed(self, ahead: int = 0) -> int:
        """Return the new blocks of the next step, or of the step `ahead` steps after it."""
        raise NotImplementedError

    def blocks(self, request: Request) -> int:
        """Return the device blocks that a member holds."""
        raise NotImplementedError


class ClientRequest:
    """What a client asks: a prompt, an output limit and an arrival time. A trace is a list of these."""

    __slots__ = CLIENT_FIELDS

    def __init__(
        self,
        id: Any,
        arrival: float,
        prompt: int,
        output: int,
        limit: Optional[int] = None,
        priority: int = 0,
        session: Optional[str] = None,
        content: Optional[Content] = None,
        follows: Any = None,
        think_time: Optional[float] = None,
        fails_at_token: Optional[int] = None,
        sampling: Optional[Sampling] = None,
        acceptance: Optional[float] = None,
    ) -> None:
        self.id = id
        self.arrival = float(arrival)  # when the client sends it; a server changes it, see Request
        self.prompt = prompt  # prompt tokens
        self.output = output  # tokens it will generate, including end-of-sequence; a policy must not read it
        self.limit = output if limit is None else limit  # output limit in tokens (max_tokens)
        self.priority = priority  # lower is served first
        self.session = session
        self.content = content  # what the prompt says; None: a text of its own
        self.follows = follows  # id of the request that must finish first (sessions, closed loops)
        self.think_time = 0.0 if think_time is None else float(think_time)  # seconds from that finish to this arrival
        self.fails_at_token = fails_at_token  # the model call that would generate this token fails
        self.sampling = sampling  # None: one answer; in a server, a SequenceGroup
        self.acceptance = acceptance  # rate at which drafted tokens of its answer are right (speculative decoding)

    def client_fields(self) -> tuple[Any, ...]:
        """Return what the client asks, in the order of CLIENT_FIELDS."""
        return (
            self.id, self.arrival, self.prompt, self.output, self.limit, self.priority, self.session,
            self.content, self.follows, self.think_time, self.fails_at_token, self.sampling, self.acceptance,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through the constructor: a compiled object has no other way."""
        return type(self), self.client_fields()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.arrival:g} s, {self.prompt}+{self.output})"


class Request(ClientRequest):
    """A request in a server: what the client asks, its progress, and the times of its events.

    `sent` is when the client sent it; metrics count from there. `arrival` is when it reached the scheduler's queue:
    policies read it, because a real scheduler knows no earlier time. Both differ if the front end delays requests,
    unless it stamps them first (EngineRules.arrival_is_send_time).

    While it decodes with the cohort, `cached` and `written` follow the cohort's step count.
    """

    __slots__ = PROGRESS_FIELDS
    _joined_step: int  # the cohort sets these six, the last three only with drafts
    _finish_step: i64
    _joined_busy_s: float
    _covered: i64  # with more generated tokens, it needs a block or leaves
    _grown: i64  # of its blocks, those that it gets in the step with the number `_grown_at`
    _grown_at: i64

    def __init__(
        self, id: Any, arrival: float, prompt: int, output: int, limit: Optional[int] = None, priority: int = 0,
        session: Optional[str] = None, content: Optional[Content] = None, follows: Any = None,
        think_time: Optional[float] = None, fails_at_token: Optional[int] = None, sampling: Optional[Sampling] = None,
        acceptance: Optional[float] = None,
    ) -> None:  # fmt: skip
        super().__init__(
            id, arrival, prompt, output, limit, priority, session, content, follows, think_time, fails_at_token,
            sampling, acceptance,
        )  # fmt: skip
        self.sent = self.arrival
        self.serial = 0  # position in the trace, later requests behind it; breaks ties
        self.status = "outside"  # outside | waiting | running | swapped | done
        self.slot: Optional[int] = None  # its row in an engine with fixed slots
        self.max_tokens = self.limit  # its output limit in the server, which may lower it
        # generated tokens at which it finishes; the server may lower it
        self.stop_at = output if limit is None or output < limit else limit
        self.host_blocks = 0  # blocks that it holds in host memory
        self.prompt_done = False  # set by a preemption: its prompt was complete, so it decodes after swap-in
        self.preemptions = 0
        self.cached_tokens = 0  # tokens that came from the prefix cache, over all admissions
        # finished | refused: rejected | failed: its model call failed | unanswered: no final message to the client |
        # lost: client timeout | aborted: client disconnected
        self.outcome: Optional[str] = None
        self.reason: Optional[str] = None
        self.visible_at = self.arrival  # end of its front-end time; its queueing time starts here
        self.received = self.arrival  # time at which the scheduler saw it: between two steps
        self.scheduled: Optional[float] = None  # time of its first step
        self.first_token: Optional[float] = None  # time of its first token
        self.last_token: Optional[float] = None  # time of its newest token
        self.finish: Optional[float] = None  # time at which it finished in the engine
        self.client_end: Optional[float] = None  # time at which the client saw the end
        self.queued = 0.0  # seconds in this state, and so on
        self.prefilling = 0.0
        self.decoding = 0.0
        self.swapped = 0.0
        self.state_since = self.arrival  # start of the queued or swapped time that is not counted yet
        self._written: i64 = 0
        self._cached: i64 = 0
        self._blocks: i64 = 0
        self.luck: i64 = -1  # the random number of its next row, which says which guesses are right; -1: none yet
        self.drafted: i64 = 0  # verified guesses
        self.accepted: i64 = 0  # right ones
        self._cohort: Optional[DecodeCohort] = None
        self._admission = 0  # number of its newest admission in its server, or of its new place in the running queue
        self.drafts = 0  # guesses of its next tokens (speculative decoding)
        self.named = 0  # its tokens that the prefix cache knows (BlockTree.only_registered)
        self._in_prefilling = False  # whether it is in its server's prefilling queue
        self._in_flight = 0  # tokens in flight, without those of the cohort

    def client_fields(self) -> tuple[Any, ...]:
        return (
            self.id, self.sent, self.prompt, self.output, self.limit, self.priority, self.session,
            self.content, self.follows, self.think_time, self.fails_at_token, self.sampling, self.acceptance,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        names = [name for name in ("arrival", *PROGRESS_FIELDS) if hasattr(self, name)]
        return restored_request, (type(self), self.client_fields(), {name: getattr(self, name) for name in names})

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.status}, {self.prompt}+{self.written}, cached {self.cached})"

    @property
    def written(self) -> int:
        """Tokens generated so far, with those in flight."""
        cohort = self._cohort
        return self._written if cohort is None else self._written + cohort.steps - self._joined_step

    @property
    def has_stopped(self) -> bool:
        """Whether it has ended by itself, with an end-of-sequence token, and not at a limit."""
        return self.outcome == "finished" and self.written == self.output < self.limit

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in device or host memory."""
        cohort = self._cohort
        return self._cached if cohort is None else self._cached + cohort.steps - self._joined_step

    @property
    def in_flight(self) -> int:
        """Of its generated tokens, those whose step has not returned: their number is known, their value is not."""
        cohort = self._cohort
        if cohort is None:
            return self._in_flight
        return self._in_flight + min(cohort.steps - self._joined_step, cohort.in_flight)

    @property
    def awaits_end(self) -> bool:
        """Whether it is running, and only its last token, which is in flight, is missing."""
        return self.status == "running" and self._cohort is None and not self._in_prefilling

    @property
    def length(self) -> int:
        """Prompt tokens plus tokens generated so far."""
        return self.prompt + self.written

    @property
    def pending(self) -> int:
        """Tokens to compute before its next token: rest of the prompt, tokens to recompute, or 1 if it decodes."""
        return self.prompt + self.written - self.cached

    @property
    def blocks(self) -> int:
        """Device blocks that it holds."""
        cohort = self._cohort
        return self._blocks if cohort is None else cohort.blocks(self)

    @property
    def group(self) -> Optional[SequenceGroup]:
        """Its sequences in a server, if it has several."""
        return self.sampling if isinstance(self.sampling, SequenceGroup) else None

    @property
    def sequences(self) -> int:
        """Sequences that generate its answers now."""
        return 1 if self.sampling is None or self.group is None else self.group.sequences

    @property
    def seats(self) -> int:
        """Sequences that it may have, as a limit of sequences counts them."""
        return 1 if self.sampling is None or self.group is None else self.group.seats

    @property
    def generated(self) -> int:
        """Tokens generated so far, of all its sequences."""
        return self.written if self.group is None else self.group.generated

    @property
    def decodes(self) -> bool:
        """Whether it is running with a complete prompt, so that it generates one token per decode step."""
        return self._cohort is not None


def restored_request(kind: type[Request], client_fields: tuple[Any, ...], progress: dict[str, Any]) -> Request:
    """Return a copy of a request, for `copy` and `pickle`."""
    request = kind(*client_fields)
    for name, value in progress.items():
        setattr(request, name, value)
    return request


def reset_request(request: Request) -> None:
    """Bring a request to its state before a server has seen it. It keeps its serial."""
    new, serial = type(request)(*request.client_fields()), request.serial
    for name in ("arrival", *PROGRESS_FIELDS):
        if hasattr(new, name):  # the cohort sets the others
            setattr(request, name, getattr(new, name))
    request.serial = serial
