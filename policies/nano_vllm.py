"""nano-vllm: prompts first, only the first of a step cut to the budget; decodes otherwise, the last giving way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

from servesim.core import Chunk, Eviction, Plan, Policy, Stuck, Traits, View, at_least

from .common import DECODE, HOLD, REST


@dataclass(frozen=True)
class NanoVLLM(Policy):
    """nano-vllm's scheduler, without its prefix cache."""

    max_num_batched_tokens: int = 16384  # prompt tokens of one step
    max_num_seqs: int = 512  # prompts of one step, and decodes of one step; more may run

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_num_batched_tokens", "max_num_seqs")

    @property
    def traits(self) -> Traits:
        return Traits(engine="nano-vllm bb823b3", validated_against="not proven: read in the source only")

    def decide(self, view: View) -> Plan:
        if view.waiting or view.prefilling:
            chunks = self._prompts(view)
            if chunks:
                return Plan(chunks=chunks)
        if view.decoding > self.max_num_seqs or view.need > view.pool.free:
            return self._decode_one_by_one(view)
        if not view.decoding:
            return REST
        return HOLD if view.waiting else DECODE

    def _prompts(self, view: View) -> list[Chunk]:
        """Go on with the half-done prompt, then admit from the head of waiting; memory is taken for whole prompts."""
        pool, free, tokens = view.pool, view.pool.free, self.max_num_batched_tokens
        chunks: list[Chunk] = []
        for request in chain(view.prefilling, view.waiting):
            part = min(request.pending, tokens)
            blocks = pool.blocks(request.length)
            cut = part < request.pending and bool(chunks)  # only the first may be cut
            if not part or cut or blocks - request.blocks > free or len(chunks) == self.max_num_seqs:
                break
            free -= blocks - request.blocks
            tokens -= part
            chunks.append(Chunk(request, part, blocks))
        return chunks

    def _decode_one_by_one(self, view: View) -> Plan:
        """Decode the first of the batch, the last giving way where a block is missing."""
        pool, free = view.pool, view.pool.free
        queue = deque(view.running)
        chunks: list[Chunk] = []
        evict: list[Eviction] = []
        while queue and len(chunks) < self.max_num_seqs:
            request = queue.popleft()
            need = pool.blocks(request.length) - request.blocks
            while need > free and queue:
                victim = queue.pop()
                evict.append(Eviction(victim))
                free += victim.blocks
            if need > free:
                why = f"the engine dies: request {request.id} alone has no memory for its next token"
                raise Stuck(why, [*view.running, *view.waiting], view.now)
            free -= need
            chunks.append(Chunk(request, 1))
        return Plan(evict=evict, chunks=chunks)
