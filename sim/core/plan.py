"""What a policy returns: the parts of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from .request import Request

FOREVER = 1 << 60  # `hold` of a plan that stays right until something happens


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
