"""The result of `Policy.decide`: the requests that change queues, and the model call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, Final, NamedTuple, Optional, SupportsIndex, Union

from .request import Request

FOREVER: Final = 1 << 60  # no limit: for holds, block counts, lengths and step numbers


def count_of(number: SupportsIndex, name: str) -> int:
    """Return a count as an int of Python: a user's policy may compute it with numpy. A float is a TypeError."""
    count = number if type(number) is int else index(number)  # also for a bool
    if count < 0:
        raise ValueError(f"{name}: expected at least 0, got {count}")
    return count


class Values:
    """Base of small objects that are equal, copied and shown by their values. Compiled named tuples are slower."""

    __slots__ = ()

    def values(self) -> tuple[Any, ...]:
        """Return the arguments of the constructor, which make an equal object."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and type(self) is type(other) and self.values() == other.values()

    __hash__ = None  # type: ignore[assignment]  # nothing needs it

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.values()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.values()}"


class Chunk(Values):
    """A number of tokens of one request that a step computes."""

    __slots__ = ("blocks", "cached", "drafts", "request", "tokens")

    def __init__(
        self, request: Request, tokens: SupportsIndex, blocks: SupportsIndex = 0, cached: SupportsIndex = 0,
        drafts: SupportsIndex = 0,
    ) -> None:  # fmt: skip
        self.request = request
        self.tokens = count_of(tokens, "Chunk.tokens")
        # blocks that the request holds from now on; 0: as many as its tokens need
        self.blocks = count_of(blocks, "Chunk.blocks")
        # tokens before these, which a request takes from the prefix cache when it is admitted
        self.cached = count_of(cached, "Chunk.cached")
        # of these tokens, the last ones that are guesses (speculative decoding): the model may reject them
        self.drafts = count_of(drafts, "Chunk.drafts")

    def values(self) -> tuple[Any, ...]:
        return self.request, self.tokens, self.blocks, self.cached, self.drafts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


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


class Reorder(NamedTuple):
    """New orders of the queues, as after the other moves of the plan; None: the order stays."""

    waiting: Optional[Sequence[Request]] = None
    running: Optional[Sequence[Request]] = None
    swapped: Optional[Sequence[Request]] = None


class Hold(Values):
    """A promise: `decide` would return the same plan for some further steps.

    It ends when a request arrives, finishes or lacks a block. The loop repeats the plan without a call of `decide`. It
    counts for plans that only decode; `until` also counts for a plan without a model call.
    """

    __slots__ = ("keep_free", "past_finish", "steps", "until")

    def __init__(
        self,
        steps: SupportsIndex = FOREVER,
        keep_free: SupportsIndex = 0,
        past_finish: object = False,
        until: Optional[float] = None,
    ) -> None:
        self.steps = count_of(steps, "Hold.steps")
        self.keep_free = count_of(keep_free, "Hold.keep_free")  # it ends before fewer blocks than this would be free
        self.past_finish = bool(past_finish)  # it does not end when a request finishes
        self.until = until  # call `decide` again at this time, even if nothing happens

    def values(self) -> tuple[Any, ...]:
        return self.steps, self.keep_free, self.past_finish, self.until


NO_HOLD: Final = Hold(0)
UNTIL_FINISH: Final = Hold()  # until a request arrives or finishes, or blocks are missing
PAST_FINISH: Final = Hold(past_finish=True)  # also while requests finish


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


class Plan:
    """One step: first `moves`, then one model call of `chunks` and decodes."""

    __slots__ = (
        "chunks", "decode", "decode_first", "extra", "hold", "moves", "padding_rows", "reorder", "state",
    )  # fmt: skip

    def __init__(
        self,
        release: Sequence[Request] = (),
        preempt: Sequence[Preemption] = (),
        reorder: Optional[Reorder] = None,
        swap_in: Sequence[Request] = (),
        admit: Sequence[Request] = (),
        reject: Sequence[Rejection] = (),
        chunks: Sequence[Chunk] = (),
        decode: object = False,  # False, True or "first"; a policy may give a number, as in `if`
        padding_rows: SupportsIndex = 0,
        hold: Union[SupportsIndex, Hold] = 0,  # a number of steps, or a promise with conditions
        state: Any = None,
        extra: Any = None,
    ) -> None:
        if reorder is not None and (reorder.waiting is not None or reorder.swapped is not None):
            self.moves = Moves(release, preempt, reorder.waiting, reorder.swapped, swap_in, admit, reject)
        elif preempt or admit or reject or swap_in or release:
            self.moves = Moves(release, preempt, None, None, swap_in, admit, reject)
        else:
            self.moves = NO_MOVES
        self.reorder = reorder  # that of the running queue follows after the model call is planned
        # In batch order. The first chunk of a waiting or swapped request admits it. Without `decode`, a one-token chunk
        # of a decoding request lets only that request decode.
        self.chunks = chunks
        self.decode = bool(decode)  # every running request with a complete prompt generates one token, in running order
        self.decode_first = False  # in the batch, decodes come before the chunks
        if isinstance(decode, str):
            if decode != "first":
                raise ValueError(f"Plan.decode: expected False, True or 'first', got {decode!r}")
            self.decode_first = True
        # rows that the engine computes in addition to the live ones
        self.padding_rows = count_of(padding_rows, "Plan.padding_rows")
        if isinstance(hold, Hold):
            self.hold = hold
        else:
            steps = count_of(hold, "Plan.hold")
            self.hold = Hold(steps) if steps else NO_HOLD
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
    def swap_in(self) -> Sequence[Request]:
        return self.moves.swap_in

    @property
    def admit(self) -> Sequence[Request]:
        return self.moves.admit

    @property
    def reject(self) -> Sequence[Rejection]:
        return self.moves.reject

    def _replace(self, **changes: Any) -> Plan:
        """Return the same plan with some arguments changed."""
        return Plan(**{**self._arguments(), **changes})

    def _arguments(self) -> dict[str, Any]:
        return {
            "release": self.release, "preempt": self.preempt, "reorder": self.reorder, "swap_in": self.swap_in,
            "admit": self.admit, "reject": self.reject, "chunks": self.chunks,
            "decode": "first" if self.decode and self.decode_first else self.decode,
            "padding_rows": self.padding_rows, "hold": self.hold, "state": self.state, "extra": self.extra,
        }  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._arguments() == other._arguments()

    __hash__ = None  # type: ignore[assignment]  # it holds lists

    def __repr__(self) -> str:
        changed = (f"{name}={value!r}" for name, value in self._arguments().items() if value and value != NO_HOLD)
        return f"Plan({', '.join(changed)})"


IDLE_PLAN: Final = Plan()
DECODE_UNTIL_FINISH: Final = Plan(decode=True, hold=UNTIL_FINISH)
DECODE_PAST_FINISH: Final = Plan(decode=True, hold=PAST_FINISH)
