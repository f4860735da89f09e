"""The input of `Policy.decide`: the queues, the block pool and the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional, Protocol

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

    __slots__ = ("block_size", "free", "host_free", "host_lost", "host_total", "total")

    def __init__(self, total: int, block_size: int, host_blocks: int = 0) -> None:
        self.total = self.free = total
        self.block_size = block_size  # tokens per block
        self.host_total = self.host_free = host_blocks
        self.host_lost = 0  # host blocks that no request can use again (Rejection.keeps_host_blocks)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return -(-tokens // self.block_size)


class View:
    """Everything that a policy may read. A policy must not change it; equal views give equal plans."""

    __slots__ = (
        "now", "waiting", "running", "swapped", "prefilling", "finished", "pool", "cohort", "max_model_len",
        "last_prefill", "state",
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
    ) -> None:
        self.now = 0.0
        self.waiting = waiting
        self.running = running
        self.swapped = swapped  # preempted requests: blocks on the host, kept on the device, or dropped
        self.prefilling = prefilling  # running requests whose prompt is not complete, in running order
        self.finished = finished  # finished requests that still hold blocks (Traits.frees_blocks_late)
        self.pool = pool
        self.cohort = cohort
        self.max_model_len = max_model_len
        self.last_prefill: Optional[tuple[float, float]] = None  # start and end of the last step with a chunk
        self.state: Any = None  # `state` of the policy's last plan

    @property
    def decoding(self) -> int:
        """Number of decoding requests: running, with a complete prompt."""
        return self.cohort.size

    @property
    def decode_block_need(self) -> int:
        """Number of new blocks that one decode step of all decoding requests needs."""
        return self.cohort.blocks_needed()
