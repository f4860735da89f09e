"""vLLM V1: no prefill phase. Every step has one token budget, for running requests first, then for waiting ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from servesim.core import (
    DECODE_PAST_FINISH,
    DECODE_UNTIL_FINISH,
    IDLE_PLAN,
    NOT_CACHED,
    Chunk,
    Plan,
    Preemption,
    Queue,
    Request,
    View,
)
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import prefilling_is_last

from .group_cache import GroupDraft
from .group_pass import GroupPass
from .pipeline_pass import PipelinePass
from .rules import Unscheduled
from .settings import VLLMSettings
from .speculation import DECODE_ONCE, decide, frees_last


@mypyc_attr(allow_interpreted_subclasses=True)
class Budget:
    """What is left for further requests while a step is planned. A scheduler with more limits has a subclass."""

    __slots__ = ("free", "tokens")

    def __init__(self, tokens: int, free: int) -> None:
        self.tokens = tokens
        self.free = free  # blocks

    @property
    def is_spent(self) -> bool:
        """Whether no further request can run."""
        return self.tokens <= 0

    def limit(self, request: Request, computed: int, tokens: int) -> int:
        """Return how many of these tokens a request may compute; -1: no further request can run."""
        return tokens

    def spend(self, request: Request, computed: int, tokens: int) -> None:
        """Give tokens to a request of which some tokens are computed already."""
        self.tokens -= tokens

    def state(self) -> Any:
        """Return the policy state after the step."""
        return None


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLMV1(VLLMSettings):
    """The scheduler of vLLM V1, with the class defaults of 0.32."""

    def decide(self, view: View) -> Plan:
        if isinstance(view.prefix_cache, GroupDraft):
            return GroupPass(self, view, view.prefix_cache.cache).run()
        if self.num_speculative_tokens:
            return decide(self, view)
        if self.pipeline_parallel_size > 1:
            return PipelinePass(self, view).run()
        return self.schedule(view, self.max_num_batched_tokens)

    def schedule(self, view: View, budget: int) -> Plan:
        """Return the plan of a step with this token budget."""
        tokens, free = budget - view.decoding, view.pool.free - view.decode_block_need
        if tokens >= 0 and free >= 0 and not view.waiting and not view.prefilling:
            return DECODE_PAST_FINISH if view.decoding else IDLE_PLAN
        max_chunk = self.max_chunk(len(view.running) + len(view.waiting))
        if tokens < 0 or free < 0:  # some requests do not run in this step, or are preempted
            return self.schedule_in_order(view, view.running, budget)
        in_order = prefilling_is_last(view.running, view.prefilling)
        left = self.make_budget(view, tokens, free)
        chunks: list[Chunk] = []
        for request in view.prefilling:
            if in_order and left.is_spent:
                break
            computed = request.cached
            size = self._chunk_tokens(view, request, min(max_chunk, left.tokens) if in_order else max_chunk)
            size = left.limit(request, computed, size)
            if size > 0:
                left.free -= view.pool.blocks_for(computed + size) - request.blocks
                left.spend(request, computed, size)
                chunks.append(Chunk(request, size))
        if left.tokens < 0 or left.free < 0:
            return self.schedule_in_order(view, view.running, budget)
        admitted: list[Chunk] = []
        may_grow = bool(view.waiting) and self.admit(view, chunks, admitted, max_chunk, left)
        state = left.state()
        if not chunks and not admitted:
            if not view.decoding:  # nothing runs, so nothing changes
                return IDLE_PLAN if view.state is None else Plan(state=view.state)
            plan = DECODE_ONCE if may_grow else DECODE_UNTIL_FINISH
            return plan if state is None else Plan(decode=True, hold=plan.hold, state=state)
        if in_order or not view.decoding:
            if chunks:
                admitted = chunks + admitted
            return Plan(chunks=admitted, decode=view.decoding > 0 and "first", state=state)
        by_request = {chunk.request: chunk for chunk in chunks}
        batch = [by_request.get(r) or Chunk(r, 1) for r in view.running if r.decodes or r in by_request]
        return Plan(chunks=batch + admitted, state=state)

    def schedule_in_order(self, view: View, running: Queue, budget: int) -> Plan:
        """Return the plan of a step with this token budget, with the running requests in this order."""
        max_chunk = self.max_chunk(len(running) + len(view.waiting))
        return self.schedule_one_by_one(view, running, max_chunk, self.make_budget(view, budget, view.pool.free))

    def make_budget(self, view: View, tokens: int, free: int) -> Budget:
        """Return what is left for requests: tokens and blocks."""
        return Budget(tokens, free)

    def _chunk_tokens(self, view: View, request: Request, tokens: int) -> int:
        """Return the tokens that a running request computes in this step."""
        size = 0 if request.awaits_end else min(request.pending, tokens)
        return size if view.max_model_len is None else min(size, view.max_model_len - 1 - request.cached)

    def candidates(self, view: View, admitted: Sequence[Chunk], left: Budget) -> Iterable[Request]:
        """Return the waiting requests in the order in which they are tried.

        `admitted` and `left` change while the result is used: they are those of this step so far.
        """
        return view.waiting

    def admit(self, view: View, running: Sequence[Chunk], chunks: list[Chunk], max_chunk: int, left: Budget) -> bool:
        """Add the first chunks of waiting requests, after those of running requests.

        Only the blocks of the first chunk are allocated. Return whether the head may soon find more cached blocks.
        """
        pool, cache, max_admitted, prefix = (
            view.pool,
            view.prefix_cache,
            (self.max_num_active_seqs or self.max_num_seqs) - len(view.running),
            NOT_CACHED,
        )
        if cache is not None:
            cache.start(running)
        if max_admitted <= 0 or left.is_spent:
            return False
        watermark_blocks = int(self.watermark * (pool.total + 1))  # vLLM counts the null block, the pool does not
        cached = shared = 0  # tokens, and blocks that other requests hold too
        for request in self.candidates(view, chunks, left):
            length = request.length
            if cache is not None:
                prefix = cache.find(request, left.free)
                cached, shared = prefix.tokens, prefix.tokens // pool.block_size - prefix.idle_blocks
            size = min(length - cached, max_chunk)
            if size > left.tokens and not self.enable_chunked_prefill:
                break
            size = left.limit(request, cached, min(size, left.tokens))
            need = pool.blocks_for(length if self.scheduler_reserve_full_isl else cached + size)
            if size < 0 or need - shared + (watermark_blocks if view.running or chunks else 0) > left.free:
                break
            left.free -= pool.blocks_for(cached + size) - shared
            left.spend(request, cached, size)
            chunks.append(Chunk(request, size, cached=cached))
            if cache is not None:
                cache.admit(request, prefix, size)
            if len(chunks) >= max_admitted or left.is_spent:
                break
        return prefix.may_grow

    def schedule_one_by_one(self, view: View, order: Iterable[Request], max_chunk: int, left: Budget) -> Plan:
        """Schedule the running requests in this order. If blocks are missing, preempt."""
        pool, cache = view.pool, view.prefix_cache
        if cache is not None:
            cache.start()
        running = list(order)
        scheduled: dict[Request, int] = {}  # tokens per request, in batch order
        preempt: list[Preemption] = []
        index = 0
        while index < len(running) and not left.is_spent:
            request = running[index]
            size = left.limit(request, request.cached, self._chunk_tokens(view, request, min(max_chunk, left.tokens)))
            if size < 0:
                break
            need = pool.blocks_for(request.cached + size) - request.blocks if size else 0
            first_victim = len(preempt)
            while need > left.free:
                victim = self.victim(running)
                running.remove(victim)
                returned_tokens = scheduled.pop(victim, 0)  # the victim was already scheduled in this step
                preempt.append(Preemption(victim, extra=Unscheduled(returned_tokens) if returned_tokens else None))
                if cache is not None:
                    left.free += cache.preempt(victim, returned_tokens)
                else:
                    left.free += pool.blocks_for(victim.cached + returned_tokens) if returned_tokens else victim.blocks
                if returned_tokens:
                    left.tokens += returned_tokens
                    index -= 1
                if victim is request:  # no request gets the blocks of these victims
                    preempt[first_victim:] = [frees_last(victim) for victim in preempt[first_victim:]]
                    chunks = [Chunk(r, size) for r, size in scheduled.items()]
                    return Plan(preempt=preempt, chunks=chunks, state=left.state())
            if size:
                scheduled[request] = size
                left.free -= need
                left.spend(request, request.cached, size)
            index += 1
        chunks = [Chunk(r, size) for r, size in scheduled.items()]
        admitted: list[Chunk] = []
        if not preempt:
            self.admit(view, chunks, admitted, max_chunk, left)
        return Plan(preempt=preempt, chunks=chunks + admitted, state=left.state())
