"""The vocabulary of the project: requests, memory, what a policy sees, what it answers, what a step costs.

Lengths are tokens, times are seconds, memory is blocks of `block_size` tokens. "Not yet" is None, never 0.
Standard library only: this file must also load inside a live engine's Python 3.9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Optional

if TYPE_CHECKING:
    from .cohort import Cohort
    from .line import Fifo, Line

FOREVER = 1 << 60  # `hold` of a plan that stays right until something happens


class BadInput(ValueError):
    """The user gave something unusable: one line that says what, where, and what was expected. Exit code 2."""


class Stuck(RuntimeError):
    """Nothing can ever run again although requests are left."""

    def __init__(self, why: str, requests: Sequence[Request], now: float) -> None:
        self.requests = tuple(requests)
        self.now = now
        names = ", ".join(str(request.id) for request in self.requests[:8])
        more = f" and {len(self.requests) - 8} more" if len(self.requests) > 8 else ""
        super().__init__(f"stuck at t={now:g} s: {why} (requests {names}{more})")


class Request:
    """One prompt and its answer: what was asked, how far it is, and where its seconds went.

    `output` is how much it will write; only an engine may look at it, a policy has `limit`.
    While it decodes with its cohort, `cached` and `written` follow the cohort's tick instead of being stored.
    """

    __slots__ = (
        "id", "arrival", "prompt", "limit", "output", "priority", "session", "prefix", "after", "delay", "fails",
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
        self.id = id
        self.arrival = arrival
        self.prompt = prompt
        self.output = output  # tokens it will write, end-of-sequence included
        self.limit = output if limit is None else limit  # tokens it may write (max_new_tokens)
        self.priority = priority  # smaller is served first
        self.session = session
        self.prefix = prefix  # hash ids of its prompt's blocks, as in Mooncake traces
        self.after = after  # id of the request whose end it waits for (sessions, closed loops)
        self.delay = delay  # seconds from that end to its own arrival
        self.fails = fails  # the model call that would write this token fails
        self.serial = 0  # rank of submission, the last tie-break
        self.place = "outside"  # outside | waiting | running | swapped | done
        self.slot: Optional[int] = None  # its row in an engine of fixed slots
        # tokens after which it is over; the server may cap it
        self.end = output if limit is None or output < limit else limit
        self.host = 0  # blocks it holds in host memory
        self.complete = False  # its prompt was complete when it was swapped out: it decodes when it comes back
        self.evictions = 0
        self.outcome: Optional[str] = None  # finished | refused | failed | unanswered | lost
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
        self._cohort: Optional[Cohort] = None
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


class Chunk(NamedTuple):
    """Tokens a request computes in one step."""

    request: Request
    tokens: int
    blocks: int = 0  # blocks to hold from now on, where the engine takes more than the tokens need


class Eviction(NamedTuple):
    """A request loses its place in the batch, and its blocks."""

    request: Request
    # recompute: cache dropped | swap: blocks copied to the host | keep: blocks stay, and it joins swapped.
    # Whoever was kept may later be swapped or dropped, and stays in swapped.
    how: str = "recompute"
    to: str = "front"  # front or back of waiting | ranked: by the order of waiting | swapped


class Rejection(NamedTuple):
    """A request leaves without an answer, or with an error for one."""

    request: Request
    reason: str
    outcome: str = "refused"  # refused | unanswered: its client is never told


class Plan(NamedTuple):
    """What a policy wants done now: carried out in the order of these fields, as one model call."""

    release: Sequence[Request] = ()  # finished requests whose blocks are given back only now
    evict: Sequence[Eviction] = ()
    waiting: Optional[Sequence[Request]] = None  # a new order of the waiting queue
    swap_in: Sequence[Request] = ()  # back from the host; they decode in this very step if the plan decodes
    fetch: Sequence[Request] = ()  # copied back from the host ahead of need; they stay in swapped
    admit: Sequence[Request] = ()  # take a place in running, and no memory yet
    reject: Sequence[Rejection] = ()
    chunks: Sequence[Chunk] = ()  # in batch order; a waiting request is admitted by its first chunk
    decode: bool = False  # every running request with a complete prompt writes one token, in running order
    decode_first: bool = False  # in the batch, the decodes stand before the chunks
    running: Optional[Sequence[Request]] = None  # a new order of the running queue
    padding: int = 0  # rows the engine runs and pays for beside the live ones
    wake: Optional[float] = None  # ask again then, even if nothing happens
    hold: int = 0  # further iterations for which this stays the answer while nothing arrives, ends or runs short
    spare: int = 0  # blocks that must stay free for that
    lasts: bool = False  # it holds beyond the end of requests too, since nobody waits for their places
    memory: Any = None  # what the policy will be told next time


class BlockPool:
    """Memory in blocks, on the device and on the host: a count, since which block is whose never matters here."""

    __slots__ = ("free", "host_free", "host_total", "size", "total")

    def __init__(self, total: int, size: int, host: int = 0) -> None:
        self.total = self.free = total
        self.size = size  # tokens a block
        self.host_total = self.host_free = host

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.size)


class View:
    """All a policy may know. Read-only by contract: equal views give equal plans."""

    __slots__ = (
        "now", "waiting", "running", "swapped", "prefilling", "finished", "pool", "cohort", "max_model_len",
        "last_prefill", "memory",
    )  # fmt: skip

    def __init__(
        self,
        waiting: Line,
        running: Line,
        swapped: Fifo,
        prefilling: Line,
        finished: Fifo,
        pool: BlockPool,
        cohort: Cohort,
        max_model_len: Optional[int],
    ) -> None:
        self.now = 0.0
        self.waiting = waiting
        self.running = running
        self.swapped = swapped
        self.prefilling = prefilling  # the running requests whose prompt is not complete, in running order
        self.finished = finished  # done, but their blocks not yet released (engines that flush late)
        self.pool = pool
        self.cohort = cohort
        self.max_model_len = max_model_len
        self.last_prefill: Optional[tuple[float, float]] = None  # start and end of the last step with a prompt
        self.memory: Any = None

    @property
    def decoding(self) -> int:
        """How many running requests write a token a step."""
        return self.cohort.size

    @property
    def need(self) -> int:
        """Blocks that one decode of all of them takes."""
        return self.cohort.need()


class Shape(NamedTuple):
    """What a step's time depends on; padded is what the device runs, live is what was asked for."""

    prefill_rows: int = 0
    prefill_tokens: int = 0  # padded
    prefill_live: int = 0
    squares: int = 0  # sum of squared chunk lengths: attention inside the chunks
    cross: int = 0  # sum of chunk x context before it: attention to what was cached
    decode_rows: int = 0  # padded
    decode_live: int = 0
    context: int = 0  # sum of cached tokens the decoding rows read
    swapped: int = 0  # blocks copied to or from the host


class StepCost:
    """Seconds a step takes."""

    steady: ClassVar[bool] = True  # whether steps of one shape always take the same

    def seconds(self, shape: Shape) -> float:
        """Return the duration of one step."""
        raise NotImplementedError

    def decode(self, rows: int, live: int, context: int) -> float:
        """Return the duration of a decode-only step: the inner loop's short cut."""
        return self.seconds(Shape(decode_rows=rows, decode_live=live, context=context))

    def line(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        """Return a and b where `decode` is exactly a + b * context for such a batch; leaps are faster for it."""
        return None


@dataclass(frozen=True)
class Policy:
    """A scheduler: its fields are the knobs, `decide` is the rule. Pure: no clock, no chance, no hidden state."""

    order: str = "arrival"  # waiting queue: arrival, shortest/longest-output/-prompt/-total, output-groups, priority
    group_width: int = 64  # tokens of output limit a group spans (order output-groups)
    aging: float = 0.0  # priority levels a second of waiting is worth (order priority)
    max_wait: Optional[float] = None  # seconds after which a waiting request goes to the front, None for never

    mirrors: ClassVar[str] = ""  # the engine and version whose rule this is
    proof: ClassVar[str] = "not proven"  # what its decisions were compared with
    running_order: ClassVar[str] = "admission"  # how the engine keeps its batch: admission | arrival | slot
    null_blocks: ClassVar[int] = 0  # blocks of the pool the engine keeps to itself
    refuses: ClassVar[bool] = True  # whether a request that can never fit is refused on arrival
    flushes: ClassVar[bool] = False  # whether finished requests hold their blocks until a plan releases them
    last_token_decodes: ClassVar[bool] = False  # whether the last token of a prompt, left by itself, runs as a decode

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {self.order!r}")
        at_least(self, 1, "group_width")
        at_least(self, 0, "aging", "max_wait")

    def decide(self, view: View) -> Plan:
        """Return what to do now."""
        raise NotImplementedError

    def begin(self) -> Any:
        """Return the memory that the first view carries."""
        return None

    def leap(self, memory: Any, iterations: int) -> Any:
        """Return the memory after so many further iterations of a held plan."""
        return memory

    def rank(self, request: Request) -> Any:
        """Return the key by which waiting is sorted; it may not change while the request waits."""
        return ORDERS[self.order](self, request)

    @property
    def paged(self) -> bool:
        """Whether the engine counts memory at all."""
        return True

    @property
    def ranked(self) -> bool:
        """Whether waiting is kept by rank instead of first come, first served."""
        return self.order != "arrival"

    def but(self, **changes: Any) -> Policy:
        """Return the same policy with some fields changed."""
        return replace(self, **changes)


# Ageing keeps the order of two waiting requests as it is, since both age alike: the key needs no clock.
ORDERS: dict[str, Any] = {
    "arrival": lambda policy, request: 0,
    "shortest-output": lambda policy, request: request.limit,
    "longest-output": lambda policy, request: -request.limit,
    "shortest-prompt": lambda policy, request: request.prompt,
    "longest-prompt": lambda policy, request: -request.prompt,
    "shortest-total": lambda policy, request: request.prompt + request.limit,
    "longest-total": lambda policy, request: -request.prompt - request.limit,
    "output-groups": lambda policy, request: request.limit // policy.group_width,
    "priority": lambda policy, request: request.priority + policy.aging * request.arrival,
}


def at_least(policy: Policy, least: float, *names: str) -> None:
    """Raise a ValueError that names the first field below its least value."""
    for name in names:
        value = getattr(policy, name)
        if value is not None and not (value >= least and value < math.inf):
            raise ValueError(f"{name}: expected at least {least:g}, got {value!r}")


def one_of(policy: Policy, /, **choices: Sequence[Any]) -> None:
    """Raise a ValueError that names the first field with a value not on its list."""
    for name, allowed in choices.items():
        value = getattr(policy, name)
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {value!r}")


def settings(policy: Policy) -> dict[str, Any]:
    """Return a policy's fields and values."""
    return {field.name: getattr(policy, field.name) for field in fields(policy)}


def just_after(start: float, wait: float) -> float:
    """Return the first instant at which more than `wait` has passed since `start`, as floats compare."""
    instant = start + wait
    while not instant - start > wait:
        instant = math.nextafter(instant, math.inf)
    return instant
