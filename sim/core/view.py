"""What a policy sees: the queues, the block pool and the clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional, Protocol

from .request import DecodeCohort, Request


class Queue(Protocol):
    """A queue as a policy sees it: to count, index and iterate."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def __reversed__(self) -> Iterator[Request]: ...

    def __getitem__(self, place: int, /) -> Request: ...


class WaitingQueue(Queue, Protocol):
    """The waiting queue also knows its oldest request."""

    def oldest(self) -> float:
        """Return the earliest arrival in the queue, which is not empty."""


class BlockPool:
    """Memory in blocks, on the device and on the host: a count, since which block is whose never matters here."""

    __slots__ = ("free", "host_free", "host_total", "size", "total")

    def __init__(self, total: int, size: int, host: int = 0) -> None:
        self.total = self.free = total
        self.size = size  # tokens a block
        self.host_total = self.host_free = host

    def blocks(self, tokens: int) -> int:
        """Return the blocks that hold this many tokens."""
        return -(-tokens // self.size)


class View:
    """All a policy may know. Read-only by contract: equal views give equal plans."""

    __slots__ = (
        "now", "waiting", "running", "swapped", "prefilling", "finished", "pool", "cohort", "max_model_len",
        "last_prefill", "memory",
    )  # fmt: skip

    def __init__(
        self,
        waiting: WaitingQueue,
        running: Queue,
        swapped: Queue,
        prefilling: Queue,
        finished: Queue,
        pool: BlockPool,
        cohort: DecodeCohort,
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
