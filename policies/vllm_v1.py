"""vLLM V1: no prefill phase. Every step has one token budget, for running requests first, then for waiting ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Optional

from servesim.core import (
    DECODE_PAST_FINISH,
    DECODE_UNTIL_FINISH,
    IDLE_PLAN,
    CachedPrefix,
    Chunk,
    Plan,
    Policy,
    Preemption,
    Request,
    Traits,
    View,
    require_at_least,
    require_effect,
    require_one_of,
)
from servesim.core.native import mypyc_attr

from .vllm_v0_common import budget_refusals, prefilling_is_last, priority_key, require_below_one

NO_PREFIX: Final = CachedPrefix(0, 0, False, 0)
DECODE_ONCE: Final = Plan(decode=True)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLMV1(Policy):
    """The synchronous scheduler of vLLM V1, with the class defaults of 0.32."""

    max_num_seqs: int = 128  # maximum running requests
    max_num_batched_tokens: int = 2048  # tokens per step, including decodes
    enable_chunked_prefill: bool = True  # a prompt may be chunked to fit the budget; otherwise it waits
    long_prefill_token_threshold: int = 0  # maximum tokens of one prompt per step, if other requests exist; 0: off
    scheduler_reserve_full_isl: bool = True  # admit only if the blocks of the whole prompt are free
    enable_prefix_caching: bool = True  # requests with equal beginnings share KV blocks
    free_order: str = "hashed_last"  # order in which free blocks are reused; append: vLLM before 0.24
    watermark: float = 0.0  # fraction of the blocks that an admission must leave free, unless no request runs
    policy: str = "fcfs"  # fcfs, or priority: waiting queue and victims sorted by (priority, arrival)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_num_seqs", "max_num_batched_tokens")
        require_at_least(self, 0, "long_prefill_token_threshold", "watermark")
        require_below_one(self.watermark)
        require_one_of(self, policy=("fcfs", "priority"), free_order=("hashed_last", "append"))
        require_effect(self, self.policy == "fcfs" or self.order == "priority", "order: priority", "aging")

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="vLLM V1 0.32.0, the synchronous scheduler without speculation",
            validated_against="recordings of the real scheduler of 0.32.0",
            arrival_is_send_time=True,  # the API server stamps it
            rejects_oversized=False,  # the real scheduler does not check this; such a request blocks the queue
            rejects_full_prompts=True,  # vLLM's input processor
            resumed_token_decodes=True,
            prefix_cache=self.free_order if self.enable_prefix_caching else "",
        )

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        refusals = budget_refusals(
            self.max_num_batched_tokens, self.max_num_seqs, not self.enable_chunked_prefill, max_model_len
        )
        threshold = self.long_prefill_token_threshold
        if max_model_len is not None and threshold > max_model_len:
            refusals.append(f"long_prefill_token_threshold ({threshold}) is above max_model_len ({max_model_len})")
        return refusals

    @property
    def is_sorted(self) -> bool:
        return super().is_sorted or self.policy == "priority"

    def sort_key(self, request: Request) -> Any:
        return (request.priority, super().sort_key(request)) if self.policy == "priority" else super().sort_key(request)

    def decide(self, view: View) -> Plan:
        tokens, free = self.max_num_batched_tokens - view.decoding, view.pool.free - view.decode_block_need
        if tokens >= 0 and free >= 0 and not view.waiting and not view.prefilling:
            return DECODE_PAST_FINISH if view.decoding else IDLE_PLAN
        max_chunk = self.long_prefill_token_threshold if len(view.running) + len(view.waiting) > 1 else 0
        max_chunk = max_chunk or self.max_num_batched_tokens
        if tokens < 0 or free < 0:  # some requests do not run in this step, or are preempted
            return self._schedule_one_by_one(view, max_chunk)
        in_order = prefilling_is_last(view.running, view.prefilling)
        chunks: list[Chunk] = []
        for request in view.prefilling:
            size = self._chunk_tokens(view, request, min(max_chunk, tokens) if in_order else max_chunk)
            free -= view.pool.blocks_for(request.cached + size) - request.blocks
            tokens -= size
            if size:
                chunks.append(Chunk(request, size))
        if tokens < 0 or free < 0:
            return self._schedule_one_by_one(view, max_chunk)
        admitted, may_grow = self._admit(view, chunks, max_chunk, tokens, free) if view.waiting else ([], False)
        if not chunks and not admitted:
            return (DECODE_ONCE if may_grow else DECODE_UNTIL_FINISH) if view.decoding else IDLE_PLAN
        if in_order or not view.decoding:
            return Plan(chunks=chunks + admitted if chunks else admitted, decode=view.decoding > 0, decode_first=True)
        by_request = {chunk.request: chunk for chunk in chunks}
        batch = [by_request.get(r) or Chunk(r, 1) for r in view.running if r.decodes or r in by_request]
        return Plan(chunks=batch + admitted)

    def _chunk_tokens(self, view: View, request: Request, tokens: int) -> int:
        """Return the tokens that a running request computes in this step."""
        size = min(request.pending, tokens)
        return size if view.max_model_len is None else min(size, view.max_model_len - 1 - request.cached)

    def _admit(
        self, view: View, running: list[Chunk], max_chunk: int, tokens: int, free: int
    ) -> tuple[list[Chunk], bool]:
        """Admit from the head of waiting, after the chunks of running requests.

        Only the blocks of the first chunk are allocated. Also return whether the head may soon find more cached blocks.
        """
        pool, cache, max_admitted, prefix = (
            view.pool,
            view.prefix_cache,
            self.max_num_seqs - len(view.running),
            NO_PREFIX,
        )
        if cache is not None:
            cache.start(running)
        watermark_blocks = int(self.watermark * (pool.total + 1))  # vLLM counts the null block, the pool does not
        chunks: list[Chunk] = []
        cached = shared = 0  # tokens, and blocks that other requests hold too
        for request in view.waiting:
            if len(chunks) >= max_admitted or tokens <= 0:
                break
            length = request.length
            if cache is not None:
                prefix = cache.find(request, free)
                cached, shared = prefix.tokens, prefix.tokens // pool.block_size - prefix.idle_blocks
            size = min(length - cached, max_chunk)
            if size > tokens and not self.enable_chunked_prefill:
                break
            size = min(size, tokens)
            need = pool.blocks_for(length if self.scheduler_reserve_full_isl else cached + size)
            if need - shared + (watermark_blocks if view.running or chunks else 0) > free:
                break
            free -= pool.blocks_for(cached + size) - shared
            tokens -= size
            chunks.append(Chunk(request, size, cached=cached))
            if cache is not None:
                cache.admit(request, prefix, size)
        return chunks, prefix.may_grow

    def _schedule_one_by_one(self, view: View, max_chunk: int) -> Plan:
        """Schedule the running requests in order. If blocks are missing, preempt."""
        pool, cache, free, tokens = view.pool, view.prefix_cache, view.pool.free, self.max_num_batched_tokens
        if cache is not None:
            cache.start()
        running = list(view.running)
        scheduled: dict[Request, int] = {}  # tokens per request, in batch order
        preempt: list[Preemption] = []
        index = 0
        while index < len(running) and tokens > 0:
            request = running[index]
            size = self._chunk_tokens(view, request, min(max_chunk, tokens))
            need = pool.blocks_for(request.cached + size) - request.blocks if size else 0
            first_victim = len(preempt)
            while need > free:
                victim = running[-1] if self.policy == "fcfs" else max(running, key=priority_key)
                running.remove(victim)
                returned_tokens = scheduled.pop(victim, 0)  # the victim was already scheduled in this step
                preempt.append(Preemption(victim, tokens=returned_tokens))
                if cache is not None:
                    free += cache.preempt(victim, returned_tokens)
                else:
                    free += pool.blocks_for(victim.cached + returned_tokens) if returned_tokens else victim.blocks
                if returned_tokens:
                    tokens += returned_tokens
                    index -= 1
                if victim is request:  # no request gets the blocks of these victims
                    preempt[first_victim:] = [victim._replace(frees_last=True) for victim in preempt[first_victim:]]
                    return Plan(preempt=preempt, chunks=[Chunk(r, size) for r, size in scheduled.items()])
            if size:
                scheduled[request] = size
                free -= need
                tokens -= size
            index += 1
        chunks = [Chunk(r, size) for r, size in scheduled.items()]
        if not preempt:
            chunks += self._admit(view, chunks, max_chunk, tokens, free)[0]
        return Plan(preempt=preempt, chunks=chunks)
