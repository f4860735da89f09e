"""nano-vllm: prefill first. Only the first prompt of a step may be chunked. The last running request is preempted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

from servesim.core import (
    DECODE_PAST_FINISH,
    DECODE_UNTIL_FINISH,
    IDLE_PLAN,
    Chunk,
    Plan,
    Policy,
    Preemption,
    Stuck,
    Traits,
    View,
    require_at_least,
)
from servesim.core.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class NanoVLLM(Policy):
    """The scheduler of nano-vllm, without its prefix cache."""

    max_num_batched_tokens: int = 16384  # prompt tokens per step
    max_num_seqs: int = 512  # prompts per step, and decodes per step; more requests may run

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_num_batched_tokens", "max_num_seqs")

    @property
    def traits(self) -> Traits:
        return Traits(engine="nano-vllm bb823b3", validated_against="not validated: written from the source code")

    def decide(self, view: View) -> Plan:
        if view.waiting or view.prefilling:
            chunks = self._schedule_prefills(view)
            if chunks:
                return Plan(chunks=chunks)
        if view.decoding > self.max_num_seqs or view.decode_block_need > view.pool.free:
            return self._decode_one_by_one(view)
        if not view.decoding:
            return IDLE_PLAN
        return DECODE_UNTIL_FINISH if view.waiting else DECODE_PAST_FINISH

    def _schedule_prefills(self, view: View) -> list[Chunk]:
        """Continue the partly computed prompt, then admit. The first chunk allocates the blocks of the whole prompt."""
        pool, free, tokens = view.pool, view.pool.free, self.max_num_batched_tokens
        chunks: list[Chunk] = []
        for request in chain(view.prefilling, view.waiting):
            size = min(request.pending, tokens)
            blocks = pool.blocks_for(request.length)
            must_wait = size < request.pending and bool(chunks)  # only the first prompt may be chunked
            if not size or must_wait or blocks - request.blocks > free or len(chunks) == self.max_num_seqs:
                break
            free -= blocks - request.blocks
            tokens -= size
            chunks.append(Chunk(request, size, blocks))
        return chunks

    def _decode_one_by_one(self, view: View) -> Plan:
        """Decode in running order. If a block is missing, preempt the last request."""
        pool, free = view.pool, view.pool.free
        queue = deque(view.running)
        chunks: list[Chunk] = []
        preempt: list[Preemption] = []
        while queue and len(chunks) < self.max_num_seqs:
            request = queue.popleft()
            need = pool.blocks_for(request.length) - request.blocks
            while need > free and queue:
                victim = queue.pop()
                preempt.append(Preemption(victim))
                free += victim.blocks
            if need > free:
                why = f"nano-vllm fails: request {request.id} runs alone and no block is free for its next token"
                raise Stuck(why, [*view.running, *view.waiting], view.now)
            free -= need
            chunks.append(Chunk(request, 1))
        return Plan(preempt=preempt, chunks=chunks)
