"""Preemption between iterations, as FastServe does it: who is left out keeps its cache, on the device or the host.

A policy of this kind says in what order everybody would like to run; the first of them that fit are the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any, Callable, NamedTuple, Optional

from servesim.core import FOREVER, Chunk, Eviction, Plan, Policy, Request, View, at_least

HOST_SHARE = 0.1  # new prompts wait while less than this share of the host's blocks is free


class Change(NamedTuple):
    """What a decision does to the batch."""

    leaving: Sequence[Request] = ()
    entering: Sequence[Request] = ()


@dataclass(frozen=True)
class Preemptive(Policy):
    """The part that preemptive policies share: who fits, and where the caches of the others go."""

    max_batch_size: int = 256  # requests of an iteration
    max_tokens_per_batch: int = 8192  # prompt tokens of an iteration
    proactive_offloading: bool = True  # keep max_batch_size blocks free, and fetch from the host ahead of need
    num_min_free_blocks_threshold: int = 0  # blocks to keep free at least (proactive)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_batch_size", "max_tokens_per_batch")
        at_least(self, 0, "num_min_free_blocks_threshold")

    @property
    def counts_decodes(self) -> bool:
        """Whether a decode takes a token of the batch."""
        return False

    @property
    def ranked(self) -> bool:
        return True  # these policies are an order

    def overdue(self, request: Request, now: float) -> bool:
        """Whether a request has waited for max_wait, and goes before everybody."""
        return self.max_wait is not None and request.arrival + self.max_wait <= now

    def prompts_wait(self, view: View) -> bool:
        """Whether the host is too full for requests that may have to go there one day."""
        total = view.pool.host_total
        return total > 0 and view.pool.host_free < HOST_SHARE * total

    def all_fit(self, view: View) -> Optional[list[Chunk]]:
        """Return the prompts of all that wait if they fit beside all that run, and nobody sits out; the usual case."""
        if view.swapped or len(view.running) + len(view.waiting) > self.max_batch_size:
            return None
        size = view.pool.size
        tokens = len(view.running) if self.counts_decodes else 0
        blocks = view.need + self._reserve
        chunks = []
        for request in view.waiting:
            prompt = request.prompt
            tokens += prompt
            blocks += -(-prompt // size)
            chunks.append(Chunk(request, prompt))
        return None if tokens > self.max_tokens_per_batch or blocks > view.pool.free else chunks

    def choose(self, view: View, newcomers: Callable[[], Iterable[Request]], key: Callable[[Request], Any]) -> Change:
        """Say who leaves and who enters, so that the first by key run; the first that does not fit ends the batch."""
        entering: list[Request] = []
        room = self.max_batch_size - len(view.running)
        tokens = len(view.running) if self.counts_decodes else 0
        for request in newcomers():
            size = self._size(request)
            if len(entering) == room or tokens + size > self.max_tokens_per_batch:
                break
            entering.append(request)
            tokens += size if size > 1 or self.counts_decodes else 0
        else:
            return Change((), entering)
        if not room and key(request) >= max(map(key, view.running)):
            return Change()
        return self._first(view, newcomers(), key)

    def _size(self, request: Request) -> int:
        """Return the tokens a request takes of the batch; who lost its cache may always compute it again."""
        if request.place == "swapped":
            return min(request.pending, self.max_tokens_per_batch)
        return request.pending

    def _first(self, view: View, newcomers: Iterable[Request], key: Callable[[Request], Any]) -> Change:
        chosen: dict[Request, None] = {}
        tokens = 0
        for request in merge(sorted(view.running, key=key), newcomers, key=key):
            size = self._size(request)
            if len(chosen) == self.max_batch_size or tokens + size > self.max_tokens_per_batch:
                break
            chosen[request] = None
            tokens += size if size > 1 or self.counts_decodes else 0
        leaving = [request for request in view.running if request not in chosen]
        return Change(leaving, [request for request in chosen if request.place != "running"])

    def arrange(self, view: View, change: Change, key: Callable[[Request], Any]) -> tuple[Plan, Change]:
        """Find memory for the batch; return the plan and the change that memory allows."""
        leaving, entering = list(change.leaving), list(change.entering)
        pool = view.pool
        need = view.need + sum(demand(request, view) for request in entering)
        need -= sum(demand(request, view) for request in leaving)
        kept = [request for request in view.swapped if request.blocks and request not in entering]
        evict: list[Eviction] = []
        fetch: list[Request] = []
        if need + self._reserve > pool.free:
            books = Books(view, need)
            for request in sorted([*kept, *leaving], key=key, reverse=True):
                if books.need + self._reserve <= books.free:
                    break
                evict.append(books.offload(request))
            if books.need > books.free:
                self._cut(view, books, leaving, entering, evict, key)
        elif self.proactive_offloading and pool.host_free < pool.host_total:
            fetch = self._ahead(view, need, entering, key)
        aging = self.max_wait is not None and len(view.waiting) > 0  # somebody may become overdue at any time
        gone = {eviction.request for eviction in evict}
        evict += [Eviction(request, "keep", "swapped") for request in leaving if request not in gone]
        back = [request for request in entering if request.place == "swapped"]
        plan = Plan(
            evict=evict,
            swap_in=back,
            fetch=fetch,
            chunks=[Chunk(request, request.pending) for request in entering if not request.cached],
            decode=len(view.running) > len(leaving) or any(request.cached for request in back),
            hold=0 if evict or entering or fetch or aging else FOREVER,
            spare=self._reserve if kept else 0,
        )
        return plan, Change(leaving, entering)

    @property
    def _reserve(self) -> int:
        """Blocks kept free of requests that sit out."""
        return max(self.max_batch_size, self.num_min_free_blocks_threshold) if self.proactive_offloading else 0

    def _cut(
        self, view: View, books: Books, leaving: list[Request], entering: list[Request], evict: list[Eviction],
        key: Callable[[Request], Any],
    ) -> None:  # fmt: skip
        """Shorten the batch from its end until what is left fits."""
        staying = [request for request in view.running if request not in leaving]
        for request in sorted([*staying, *entering], key=key, reverse=True):
            if books.need <= books.free:
                break
            books.need -= demand(request, view)
            if request.place == "running":
                leaving.append(request)
            else:
                entering.remove(request)
            if request.blocks:
                evict.append(books.offload(request))

    def _ahead(self, view: View, need: int, entering: list[Request], key: Callable[[Request], Any]) -> list[Request]:
        """Return who of the first that sit out can come back from the host without anybody giving way."""
        free = view.pool.free - need - self._reserve
        fetch = []
        outside = [request for request in view.swapped if request not in entering]
        for request in sorted(outside, key=key)[: self.max_batch_size]:
            if request.host and request.host <= free:
                free -= request.host
                fetch.append(request)
        return fetch


class Books:
    """Memory as a plan moves things: what the batch needs, what is free, and what the host can take."""

    def __init__(self, view: View, need: int) -> None:
        self.need = need
        self.free = view.pool.free
        self.host = view.pool.host_free

    def offload(self, request: Request) -> Eviction:
        """Take a request's blocks: to the host, or dropped where it has no room."""
        self.free += request.blocks
        if request.blocks > self.host:
            return Eviction(request, "recompute", "swapped")
        self.host -= request.blocks
        return Eviction(request, "swap", "swapped")


def demand(request: Request, view: View) -> int:
    """Return the blocks a request's next iteration takes, beyond those it has on the device."""
    return view.pool.blocks(request.length) - request.blocks
