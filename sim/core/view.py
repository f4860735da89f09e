"""The input of `Policy.decide`: the queues, the block pool and the time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Optional, Protocol

from .native import mypyc_attr
from .plan import Chunk
from .request import DecodeCohort, Request


class Queue(Protocol):
    """A queue as a policy uses it, to count, index and iterate: a queue of the server, or a list of requests."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def __reversed__(self) -> Iterator[Request]: ...

    def __getitem__(self, index: int, /) -> Request: ...


class ServerQueue:
    """A queue of a server. Its subclasses are in the engine (queues.py)."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __bool__(self) -> bool:  # compiled, it is called directly, which `__len__` is not
        raise NotImplementedError

    def __iter__(self) -> Iterator[Request]:
        raise NotImplementedError

    def __reversed__(self) -> Iterator[Request]:
        raise NotImplementedError

    def __getitem__(self, index: int, /) -> Request:
        raise NotImplementedError

    def oldest(self) -> float:
        """Return the earliest arrival time in the queue. The queue must not be empty."""
        raise NotImplementedError


class BlockPool:
    """The KV blocks on the device and on the host, as counts. Block ids do not matter in a simulation."""

    __slots__ = ("block_size", "evictable", "free", "host_free", "host_lost", "host_total", "lost", "total")

    def __init__(self, total: int, block_size: int, host_blocks: int = 0) -> None:
        self.total = self.free = total
        self.block_size = block_size  # tokens per block
        self.evictable = 0  # cached blocks that no request holds, if these are not free
        self.host_total = self.host_free = host_blocks
        self.lost = 0  # device blocks that the engine never frees, because of a defect
        self.host_lost = 0  # host blocks that no request can use again (Rejection.keeps_host_blocks)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    @property
    def held(self) -> int:
        """Blocks that requests hold."""
        return self.total - self.free - self.evictable


class CachedPrefix:
    """The beginning of a waiting request that the prefix cache has."""

    __slots__ = ("blocks_in_cache", "idle_blocks", "may_grow", "tokens")

    def __init__(self, tokens: int, idle_blocks: int, may_grow: bool, blocks_in_cache: int) -> None:
        self.tokens = tokens  # they need not be computed
        self.idle_blocks = idle_blocks  # of its blocks, those that an admission takes: no request holds them
        self.may_grow = may_grow  # its tokens may change in the next step: do not hold a plan that waits for blocks
        self.blocks_in_cache = blocks_in_cache  # without those that this step fills


NOT_CACHED: Final = CachedPrefix(0, 0, False, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class CacheDraft:
    """The prefix cache while a policy plans a step. It changes nothing; a policy tells it what it has planned so far.

    Blocks that the step fills can be used by the requests that are admitted after them, in the same step.
    """

    __slots__ = ()

    def start(self, chunks: Iterable[Chunk] = (), decodes: bool = True) -> None:
        """Forget the earlier draft. In this step, running requests compute these chunks, and the others decode."""
        raise NotImplementedError

    def find(self, request: Request, free: int) -> CachedPrefix:
        """Return what the cache has of a waiting request, if the plan so far leaves this number of blocks free."""
        raise NotImplementedError

    def admit(self, request: Request, prefix: CachedPrefix, tokens: int) -> None:
        """Plan to admit a request: it uses the prefix and computes the next tokens."""
        raise NotImplementedError

    def preempt(self, request: Request, tokens: int, blocks: int = 0) -> int:
        """Plan to preempt a request, to which the step had given tokens. Return how many blocks become free.

        If evictable blocks are not free, these count, too.
        """
        raise NotImplementedError


class View:
    """Everything that a policy may read. A policy must not change it; equal views give equal plans."""

    __slots__ = (
        "now", "waiting", "running", "swapped", "prefilling", "finished", "pool", "cohort", "max_model_len",
        "prefix_cache", "state", "has_groups", "engine",
    )  # fmt: skip

    def __init__(
        self,
        waiting: ServerQueue,
        running: ServerQueue,
        swapped: ServerQueue,
        prefilling: ServerQueue,
        finished: ServerQueue,
        pool: BlockPool,
        cohort: DecodeCohort,
        max_model_len: Optional[int],
        prefix_cache: Optional[CacheDraft] = None,
    ) -> None:
        self.now = 0.0
        self.waiting = waiting
        self.running = running
        self.swapped = swapped  # preempted requests: blocks on the host, kept on the device, or dropped
        self.prefilling = prefilling  # running requests whose prompt is not complete, in running order
        self.finished = finished  # finished requests that still hold blocks, in some engines
        self.pool = pool
        self.cohort = cohort
        self.max_model_len = max_model_len
        self.prefix_cache = prefix_cache  # None: the engine has none
        self.engine: Any = None  # more that the rules of one engine show to its policy
        self.has_groups = False  # a request with several sequences has arrived
        self.state: Any = None  # `state` of the policy's last plan

    @property
    def decoding(self) -> int:
        """Number of decoding sequences: those of running requests with a complete prompt."""
        return self.cohort.size

    @property
    def decode_block_need(self) -> int:
        """Number of new blocks that one decode step of all decoding requests needs."""
        return self.cohort.blocks_needed()
