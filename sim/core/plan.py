"""What a policy returns: the requests that change queues, and the model call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

from .request import Request

FOREVER = 1 << 60  # `hold` of a plan that stays right until something happens


class Chunk:
    """Tokens a request computes in one step."""

    __slots__ = ("blocks", "request", "tokens")

    def __init__(self, request: Request, tokens: int, blocks: int = 0) -> None:
        self.request = request
        self.tokens = tokens
        self.blocks = blocks  # blocks to hold from now on, where the engine takes more than the tokens need

    def __iter__(self) -> Iterator[Any]:
        return iter((self.request, self.tokens, self.blocks))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunk) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"Chunk({self.request!r}, {self.tokens}, {self.blocks})"


class Eviction(NamedTuple):
    """A request loses its place in the batch, and its blocks."""

    request: Request
    # recompute: cache dropped | swap: blocks copied to the host | keep: blocks stay, and it joins swapped.
    # A request that was kept may later be swapped or dropped, and stays in swapped.
    how: str = "recompute"
    to: str = "front"  # front or back of waiting | ranked: by the order of waiting | swapped


class Rejection(NamedTuple):
    """A request leaves without an answer, or with an error for one."""

    request: Request
    reason: str
    outcome: str = "refused"  # refused | unanswered: its client gets no reply


class Moves(NamedTuple):
    """The requests that change queues before the model call, in this order."""

    release: Sequence[Request] = ()  # finished requests whose blocks are given back only now
    evict: Sequence[Eviction] = ()
    waiting: Optional[Sequence[Request]] = None  # a new order of the waiting queue
    swap_in: Sequence[Request] = ()  # back from the host; they decode in this very step if the plan decodes
    fetch: Sequence[Request] = ()  # copied back from the host ahead of need; they stay in swapped
    admit: Sequence[Request] = ()  # join running, and take no blocks yet
    reject: Sequence[Rejection] = ()


NO_MOVES = Moves()


class Plan:
    """What a policy wants done now: first `moves`, then one model call of `chunks` and decodes.

    `hold` promises the same plan for further steps, so that the simulator can run them as one event.
    """

    __slots__ = (
        "moves", "chunks", "decode", "decode_first", "running", "padding", "wake", "hold", "spare", "lasts", "memory",
    )  # fmt: skip

    def __init__(
        self,
        release: Sequence[Request] = (),
        evict: Sequence[Eviction] = (),
        waiting: Optional[Sequence[Request]] = None,
        swap_in: Sequence[Request] = (),
        fetch: Sequence[Request] = (),
        admit: Sequence[Request] = (),
        reject: Sequence[Rejection] = (),
        chunks: Sequence[Chunk] = (),
        decode: bool = False,
        decode_first: bool = False,
        running: Optional[Sequence[Request]] = None,
        padding: int = 0,
        wake: Optional[float] = None,
        hold: int = 0,
        spare: int = 0,
        lasts: bool = False,
        memory: Any = None,
    ) -> None:
        if evict or admit or reject or swap_in or fetch or release or waiting is not None:
            self.moves = Moves(release, evict, waiting, swap_in, fetch, admit, reject)
        else:
            self.moves = NO_MOVES
        self.chunks = chunks  # in batch order; a waiting request is admitted by its first chunk
        self.decode = decode  # every running request with a complete prompt generates one token, in running order
        self.decode_first = decode_first  # in the batch, the decodes stand before the chunks
        self.running = running  # a new order of the running queue
        self.padding = padding  # rows the engine runs and pays for besides the live ones
        self.wake = wake  # decide again then, even if nothing happens
        self.hold = hold  # further steps for which this stays the plan while nothing arrives, ends or runs short
        self.spare = spare  # blocks that must stay free for that
        self.lasts = lasts  # it holds beyond the end of requests too, since no request waits for their places
        self.memory = memory  # state of the policy, part of its next view

    def __getattr__(self, name: str) -> Any:
        """Return a field of `moves`, as in 0.1."""
        if name in Moves._fields:
            return getattr(self.moves, name)
        raise AttributeError(f"a Plan has no field {name!r}")

    def _replace(self, **changes: Any) -> Plan:
        """Return the same plan with some fields changed."""
        return Plan(**{**self._fields(), **changes})

    def _fields(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__[1:]}
        return {**self.moves._asdict(), **values}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]  # it holds lists

    def __repr__(self) -> str:
        changed = (f"{name}={value!r}" for name, value in self._fields().items() if value)
        return f"Plan({', '.join(changed)})"
