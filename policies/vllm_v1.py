"""vLLM V1: no phases; every step hands out one token budget, to running requests first, then to waiting ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from servesim.core import Chunk, Eviction, Plan, Policy, Request, Traits, View, at_least, one_of

from .common import DECODE, HOLD, REST
from .vllm_v0_common import below_one, by_priority, ends_with


@dataclass(frozen=True)
class VLLMV1(Policy):
    """vLLM V1's synchronous scheduler, with the class defaults of 0.32."""

    max_num_seqs: int = 128  # requests that run at once
    max_num_batched_tokens: int = 2048  # tokens of one step, decodes included
    enable_chunked_prefill: bool = True  # a prompt may be cut to what is left of the budget; else it waits
    long_prefill_token_threshold: int = 0  # tokens of one prompt in a step, unless it is alone; 0 is off
    scheduler_reserve_full_isl: bool = True  # admit only if the whole prompt fits now, not just its first part
    watermark: float = 0.0  # share of the blocks that an admission must leave free, unless nothing runs
    policy: str = "fcfs"  # fcfs, or priority: waiting and victims by (priority, arrival)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_num_seqs", "max_num_batched_tokens")
        at_least(self, 0, "long_prefill_token_threshold", "watermark")
        below_one(self.watermark)
        one_of(self, policy=("fcfs", "priority"))

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="vLLM V1 0.32.0, the synchronous scheduler without prefix caching or speculation",
            validated_against="recordings of the real scheduler of 0.32.0",
            rejects_oversized=False,  # its scheduler does not look; what cannot fit blocks the queue
        )

    @property
    def ranked(self) -> bool:
        return super().ranked or self.policy == "priority"

    def rank(self, request: Request) -> Any:
        return (request.priority, super().rank(request)) if self.policy == "priority" else super().rank(request)

    def decide(self, view: View) -> Plan:
        tokens, free = self.max_num_batched_tokens - view.decoding, view.pool.free - view.need
        if tokens >= 0 and free >= 0 and not view.waiting and not view.prefilling:
            return DECODE if view.decoding else REST
        most = self.long_prefill_token_threshold if len(view.running) + len(view.waiting) > 1 else 0
        most = most or self.max_num_batched_tokens
        if tokens < 0 or free < 0:
            return self._one_by_one(view, most)
        in_order = ends_with(view.running, view.prefilling)
        chunks: list[Chunk] = []
        for request in view.prefilling:
            part = self._part(view, request, min(most, tokens) if in_order else most)
            free -= view.pool.blocks(request.cached + part) - request.blocks
            tokens -= part
            if part:
                chunks.append(Chunk(request, part))
        if tokens < 0 or free < 0:
            return self._one_by_one(view, most)
        fresh = self._admissions(view, most, tokens, free) if view.waiting else []
        if not chunks and not fresh:
            return HOLD if view.decoding else REST
        if in_order or not view.decoding:
            return Plan(chunks=chunks + fresh if chunks else fresh, decode=view.decoding > 0, decode_first=True)
        parts = {chunk.request: chunk for chunk in chunks}
        batch = [parts.get(r) or Chunk(r, 1) for r in view.running if r.decodes or r in parts]
        return Plan(chunks=batch + fresh)

    def _part(self, view: View, request: Request, tokens: int) -> int:
        """Return how many tokens a running request gets."""
        part = min(request.pending, tokens)
        return part if view.max_model_len is None else min(part, view.max_model_len - 1 - request.cached)

    def _admissions(self, view: View, most: int, tokens: int, free: int) -> list[Chunk]:
        """Admit from the head of waiting; only the blocks of the first part are taken."""
        pool, seats = view.pool, self.max_num_seqs - len(view.running)
        reserve = int(self.watermark * (pool.total + 1))  # num_gpu_blocks counts the null block, num_blocks does not
        chunks: list[Chunk] = []
        for request in view.waiting:
            if len(chunks) >= seats or tokens <= 0:
                break
            length = request.length
            part = min(length, most)
            if part > tokens and not self.enable_chunked_prefill:
                break
            part = min(part, tokens)
            need = pool.blocks(length if self.scheduler_reserve_full_isl else part)
            if need + (reserve if view.running or chunks else 0) > free:
                break
            free -= pool.blocks(part)
            tokens -= part
            chunks.append(Chunk(request, part))
        return chunks

    def _one_by_one(self, view: View, most: int) -> Plan:
        """Hand the budget to the running requests in order, preempting where memory is short."""
        pool, free, tokens = view.pool, view.pool.free, self.max_num_batched_tokens
        running = list(view.running)
        given: dict[Request, int] = {}  # tokens, in batch order
        evict: list[Eviction] = []
        place = 0
        while place < len(running) and tokens > 0:
            request = running[place]
            part = self._part(view, request, min(most, tokens))
            need = pool.blocks(request.cached + part) - request.blocks if part else 0
            while need > free:
                victim = running[-1] if self.policy == "fcfs" else max(running, key=by_priority)
                evict.append(Eviction(victim))
                running.remove(victim)
                back = given.pop(victim, 0)
                free += pool.blocks(victim.cached + back) if back else victim.blocks
                if back:  # it had its tokens already, and stood before this one
                    tokens += back
                    place -= 1
                if victim is request:
                    return Plan(evict=evict, chunks=[Chunk(r, part) for r, part in given.items()])
            if part:
                given[request] = part
                free -= need
                tokens -= part
            place += 1
        chunks = [Chunk(r, part) for r, part in given.items()]
        if not evict:
            chunks += self._admissions(view, most, tokens, free)
        return Plan(evict=evict, chunks=chunks)
