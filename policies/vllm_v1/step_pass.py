"""One decision of vLLM V1: running requests get tokens and blocks one by one, then waiting ones, until one is short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Optional

from servesim.core import FOREVER, NOT_CACHED, CachedPrefix, Chunk, Plan, Preemption, Request, View
from servesim.core.native import mypyc_attr

from .rules import Unscheduled
from .settings import VLLMSettings

DECODE_ONCE: Final = Plan(decode=True)
# Older versions forget a victim that the step has passed over, because its last token is in flight: the request behind
# the current one then does not run. 0.29.0 is the first version that is known to have this repaired.
COUNTS_PASSED_OVER: Final = (0, 29, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class Pass:
    """What is left for further requests, and what is planned so far. A scheduler with more limits has a subclass."""

    def __init__(self, policy: VLLMSettings, view: View, tokens: int, free: int) -> None:
        self.policy, self.view = policy, view
        self.tokens = tokens
        self.free = free  # blocks
        self.most = FOREVER if view.max_model_len is None else view.max_model_len
        self.max_chunk = policy.max_chunk(len(view.running) + len(view.waiting) or 1)
        self.scheduled: dict[Request, Chunk] = {}  # running requests, in batch order
        self.preempt: list[Preemption] = []
        self.decodes = True  # whether the step has decodes beside the chunks
        self.spares_first = True  # whether the watermark does not count if no request runs

    @property
    def room(self) -> int:
        """The most tokens of one more request."""
        return self.tokens

    def limit(self, request: Request, computed: int, tokens: int) -> int:
        """Return how many of these tokens a request may compute."""
        return tokens

    def spend(self, request: Request, computed: int, tokens: int) -> None:
        """Give tokens to a request of which some tokens are computed already."""
        self.tokens -= tokens

    def state(self) -> Any:
        """Return the policy state after the step."""
        return None

    def run_in_order(self, running: list[Request]) -> Plan:
        """Return the plan of a step with the running requests in this order."""
        if self.view.prefix_cache is not None:
            self.view.prefix_cache.start()
        self.schedule_running(running)
        chunks = list(self.scheduled.values())
        if not self.preempt:
            self.admit(chunks)
        return Plan(preempt=self.preempt, chunks=chunks, state=self.state())

    def schedule_running(self, running: list[Request]) -> None:
        """Schedule running requests. If blocks are missing, preempt; then no waiting request may follow."""
        index = 0
        while index < len(running) and self.room > 0:
            request = running[index]
            tokens = self.running_tokens(request)
            if tokens <= 0:
                index += 1
                continue
            missing, first = self.missing(request, tokens), len(self.preempt)
            while missing > self.free:
                victim = self.policy.victim(running)
                index -= self.is_behind(victim, running, index)
                running.remove(victim)
                self.put_off(victim)
                if victim is request:  # no request gets the blocks of these victims
                    self.preempt[first:] = [frees_last(gone) for gone in self.preempt[first:]]
                    return
            self.give(request, tokens, missing)
            index += 1

    def is_behind(self, victim: Request, running: Sequence[Request], index: int) -> bool:
        """Whether the requests from `index` on move up if the victim leaves."""
        if self.policy.is_since(COUNTS_PASSED_OVER):
            return running.index(victim) < index
        return victim in self.scheduled

    def running_tokens(self, request: Request) -> int:
        """Return the tokens of a running request in this step."""
        if request.awaits_end:
            return 0
        cached = request.cached
        return self.limit(request, cached, min(request.pending, self.max_chunk, self.room, self.most - 1 - cached))

    def missing(self, request: Request, tokens: int) -> int:
        """Return the blocks that a running request needs for these tokens."""
        return self.view.pool.blocks_for(request.cached + tokens) - request.blocks

    def give(self, request: Request, tokens: int, missing: int) -> None:
        """Plan to give a running request tokens, and the blocks that it misses."""
        self.scheduled[request] = Chunk(request, tokens)
        self.free -= missing
        self.spend(request, request.cached, tokens)

    def put_off(self, victim: Request) -> None:
        """Plan to preempt a request, which may be scheduled in this step."""
        chunk, cache = self.scheduled.pop(victim, None), self.view.prefix_cache
        tokens, blocks = 0, victim.blocks
        if chunk is not None:
            tokens, blocks = chunk.tokens, self.view.pool.blocks_for(victim.cached + chunk.tokens)
        self.preempt.append(Preemption(victim, extra=Unscheduled(tokens) if tokens else None))
        self.free += blocks if cache is None else cache.preempt(victim, tokens)
        self.tokens += tokens

    def candidates(self, chunks: Sequence[Chunk]) -> Iterable[Request]:
        """Return the waiting requests in the order in which they are tried. `chunks`: all of this step so far."""
        return self.view.waiting

    def admit(self, chunks: list[Chunk]) -> bool:
        """Add the first chunks of waiting requests. Return whether the head may soon find more cached blocks.

        Only the blocks of the first chunk are allocated.
        """
        policy, view, pool, prefix = self.policy, self.view, self.view.pool, NOT_CACHED
        if view.prefix_cache is not None:
            view.prefix_cache.start(chunks, self.decodes)
        seats = (policy.max_num_active_seqs or policy.max_num_seqs) - len(view.running)
        if seats <= 0 or self.room <= 0:
            return False
        watermark = int(policy.watermark * (pool.total + 1))  # vLLM counts the null block, the pool does not
        for request in self.candidates(chunks):
            prefix = self.find(request)
            chunk = self.first_chunk(request, prefix.tokens)
            if chunk is None:
                break
            need = taken = self.admission_blocks(request, prefix, self.blocks(chunk.cached + chunk.tokens), False)
            if policy.scheduler_reserve_full_isl:
                whole = pool.blocks_for(min(request.length, self.most))
                need = max(need, self.admission_blocks(request, prefix, whole, True))
            if need + (watermark if view.running or chunks or not self.spares_first else 0) > self.free:
                break
            self.spend(request, chunk.cached, chunk.tokens)
            chunks.append(chunk)
            self.enter(chunk, prefix, taken)
            seats -= 1
            if seats <= 0 or self.room <= 0:
                break
        return prefix.may_grow

    def first_chunk(self, request: Request, cached: int) -> Optional[Chunk]:
        """Return the first chunk of a waiting request; None: it must wait."""
        tokens = self.first_tokens(request, cached)
        return Chunk(request, tokens, cached=cached) if tokens > 0 else None

    def first_tokens(self, request: Request, cached: int) -> int:
        """Return the tokens of the first chunk of a waiting request; 0: it must wait."""
        tokens, room = min(request.length - cached, self.max_chunk), self.room
        if tokens > room and not self.policy.enable_chunked_prefill:
            return 0
        return self.limit(request, cached, min(tokens, room))

    def blocks(self, tokens: int) -> int:
        """Return the blocks of a request with these computed tokens."""
        return self.view.pool.blocks_for(tokens)

    def find(self, request: Request) -> CachedPrefix:
        """Return what the cache has of a waiting request."""
        cache = self.view.prefix_cache
        return NOT_CACHED if cache is None else cache.find(request, self.free)

    def admission_blocks(self, request: Request, prefix: CachedPrefix, blocks: int, is_whole: bool) -> int:
        """Return the free blocks that a waiting request takes to hold these; `is_whole`: for all its tokens."""
        return blocks - (prefix.tokens // self.view.pool.block_size - prefix.idle_blocks)

    def enter(self, chunk: Chunk, prefix: CachedPrefix, taken: int) -> None:
        """Plan to admit the request of a chunk, which takes these free blocks."""
        self.free -= taken
        if self.view.prefix_cache is not None:
            self.view.prefix_cache.admit(chunk.request, prefix, chunk.tokens - chunk.drafts)


def frees_last(preemption: Preemption) -> Preemption:
    """Return a preemption whose request releases its blocks after the chunks have taken theirs."""
    extra = Unscheduled() if preemption.extra is None else preemption.extra
    return preemption._replace(extra=extra._replace(frees_last=True))
