"""The result of `Policy.decide`: the requests that change queues, and the model call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, Final, NamedTuple, Optional, SupportsIndex

from .request import Request

FOREVER: Final = 1 << 60  # no limit: for `hold`, block counts, lengths and step numbers


def count_of(number: SupportsIndex, name: str) -> int:
    """Return a count as an int of Python: a user's policy may compute it with numpy. A float is a TypeError."""
    count = number if type(number) is int else index(number)  # also for a bool
    if count < 0:
        raise ValueError(f"{name}: expected at least 0, got {count}")
    return count


class Chunk:
    """A number of tokens of one request that a step computes."""

    __slots__ = ("blocks", "cached", "request", "tokens")

    def __init__(
        self, request: Request, tokens: SupportsIndex, blocks: SupportsIndex = 0, cached: SupportsIndex = 0
    ) -> None:
        self.request = request
        self.tokens = count_of(tokens, "Chunk.tokens")
        # blocks that the request holds from now on; 0: as many as its tokens need
        self.blocks = count_of(blocks, "Chunk.blocks")
        # tokens before these, which a request takes from the prefix cache when it is admitted
        self.cached = count_of(cached, "Chunk.cached")

    def __iter__(self) -> Iterator[Any]:
        return iter((self.request, self.tokens, self.blocks, self.cached))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunk) and tuple(self) == tuple(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return Chunk, tuple(self)

    def __repr__(self) -> str:
        return f"Chunk({self.request!r}, {self.tokens}, {self.blocks}, {self.cached})"


class Preemption(NamedTuple):
    """Take a request out of the running batch."""

    request: Request
    # recompute: drop its blocks | swap: copy its blocks to the host | keep: leave its blocks on the device.
    # swap and keep need queue="swapped". A later plan may swap or drop the blocks of a request that was kept.
    mode: str = "recompute"
    # front or back of a FIFO waiting queue | sorted: by its sort key | swapped. A sorted waiting queue always uses the
    # sort key.
    queue: str = "front"
    extra: Any = None  # more for the rules of one engine; only they read it


class Rejection(NamedTuple):
    """Remove a request without serving it to the end."""

    request: Request
    reason: str
    outcome: str = "refused"  # refused: client gets an error | unanswered: client gets no reply | aborted: no client
    keeps_host_blocks: bool = False  # a defect of the engine: no request can use its host blocks again


class Moves(NamedTuple):
    """Changes before the model call: queues, freed blocks and swaps. The engine applies the fields in this order."""

    release: Sequence[Request] = ()  # finished requests whose blocks are freed only now
    preempt: Sequence[Preemption] = ()
    reorder_waiting: Optional[Sequence[Request]] = None  # the new order of the waiting queue
    reorder_swapped: Optional[Sequence[Request]] = None  # the new order of the swapped queue
    swap_in: Sequence[Request] = ()  # back from the host; they decode in this step if the plan decodes
    admit: Sequence[Request] = ()  # move to running without blocks
    reject: Sequence[Rejection] = ()


NO_MOVES: Final = Moves()
# The fields of Plan in addition to those of Moves.
STEP_FIELDS: Final = (
    "chunks", "decode", "decode_first", "reorder_running", "padding_rows", "wake_at", "hold", "keep_free",
    "hold_past_finish", "state", "extra",
)  # fmt: skip


class Plan:
    """One step: first `moves`, then one model call of `chunks` and decodes.

    `hold` is a promise: `decide` would return the same plan for this number of further steps, if no request arrives,
    finishes or lacks a block. The simulator then runs these steps as one event. It counts for decode-only plans.
    """

    __slots__ = ("moves", *STEP_FIELDS)

    def __init__(
        self,
        release: Sequence[Request] = (),
        preempt: Sequence[Preemption] = (),
        reorder_waiting: Optional[Sequence[Request]] = None,
        swap_in: Sequence[Request] = (),
        admit: Sequence[Request] = (),
        reject: Sequence[Rejection] = (),
        chunks: Sequence[Chunk] = (),
        decode: object = False,  # true or false; a policy may give a number, as in `if`
        decode_first: object = False,
        reorder_running: Optional[Sequence[Request]] = None,
        padding_rows: SupportsIndex = 0,
        wake_at: Optional[float] = None,
        hold: SupportsIndex = 0,
        keep_free: SupportsIndex = 0,
        hold_past_finish: object = False,
        state: Any = None,
        reorder_swapped: Optional[Sequence[Request]] = None,
        extra: Any = None,
    ) -> None:
        if (
            preempt or admit or reject or swap_in or release
            or reorder_waiting is not None or reorder_swapped is not None
        ):  # fmt: skip
            self.moves = Moves(release, preempt, reorder_waiting, reorder_swapped, swap_in, admit, reject)
        else:
            self.moves = NO_MOVES
        # In batch order. The first chunk of a waiting or swapped request admits it. Without `decode`, a one-token chunk
        # of a decoding request lets only that request decode.
        self.chunks = chunks
        self.decode = bool(decode)  # every running request with a complete prompt generates one token, in running order
        self.decode_first = bool(decode_first)  # in the batch, decodes come before the chunks
        self.reorder_running = reorder_running  # the new order of the running queue
        # rows that the engine computes in addition to the live ones
        self.padding_rows = count_of(padding_rows, "Plan.padding_rows")
        self.wake_at = wake_at  # call `decide` again at this time, even if nothing happens
        # further steps for which `decide` would return this plan; see the class
        self.hold = count_of(hold, "Plan.hold")
        # the hold ends before fewer blocks than this would be free
        self.keep_free = count_of(keep_free, "Plan.keep_free")
        self.hold_past_finish = bool(hold_past_finish)  # the hold does not end when a request finishes
        self.state = state  # policy state, part of the next view
        self.extra = extra  # more for the rules of one engine; only they read it

    # Properties, because `__getattr__` would make every access to a field of a plan slower.
    @property
    def release(self) -> Sequence[Request]:
        return self.moves.release

    @property
    def preempt(self) -> Sequence[Preemption]:
        return self.moves.preempt

    @property
    def reorder_waiting(self) -> Optional[Sequence[Request]]:
        return self.moves.reorder_waiting

    @property
    def reorder_swapped(self) -> Optional[Sequence[Request]]:
        return self.moves.reorder_swapped

    @property
    def swap_in(self) -> Sequence[Request]:
        return self.moves.swap_in

    @property
    def admit(self) -> Sequence[Request]:
        return self.moves.admit

    @property
    def reject(self) -> Sequence[Rejection]:
        return self.moves.reject

    def _replace(self, **changes: Any) -> Plan:
        """Return the same plan with some fields changed."""
        return Plan(**{**self._fields(), **changes})

    def _fields(self) -> dict[str, Any]:
        return {**self.moves._asdict(), **{name: getattr(self, name) for name in STEP_FIELDS}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]  # it holds lists

    def __repr__(self) -> str:
        changed = (f"{name}={value!r}" for name, value in self._fields().items() if value)
        return f"Plan({', '.join(changed)})"


IDLE_PLAN: Final = Plan()
# The first is held until a request arrives or finishes, or blocks are missing; the second also while requests finish.
DECODE_UNTIL_FINISH: Final = Plan(decode=True, hold=FOREVER)
DECODE_PAST_FINISH: Final = DECODE_UNTIL_FINISH._replace(hold_past_finish=True)
