from dataclasses import dataclass
from itertools import chain

from servesim.core import FOREVER, Chunk, Plan, Policy, Request, View


@dataclass(frozen=True)
class ShortPrompts(Policy):
    """Chunked prefill that starts short prompts first. A long prompt waits longer, but it gets its turn."""

    max_num_seqs: int = 128  # maximum number of running requests
    max_num_batched_tokens: int = 2048  # tokens per step
    delay_per_token: float = 0.002  # a prompt lets others pass that arrive within this many seconds per prompt token

    @property
    def is_sorted(self) -> bool:
        return True  # the waiting queue, by sort_key

    def sort_key(self, request: Request) -> float:
        return request.arrival + self.delay_per_token * request.prompt

    def decide(self, view: View) -> Plan:
        chunks, free, slots = [], view.pool.free, self.max_num_seqs - len(view.running)
        tokens = self.max_num_batched_tokens - view.decoding
        for request in chain(view.prefilling, view.waiting):
            new, blocks = request.blocks == 0, view.pool.blocks_for(request.prompt + request.limit)
            if tokens <= 0 or (new and (slots == 0 or blocks > free)):
                break
            chunks.append(Chunk(request, min(request.pending, tokens), blocks))  # all blocks: it is never preempted
            tokens, free, slots = tokens - chunks[-1].tokens, free - new * blocks, slots - new
        return Plan(chunks=chunks, decode=view.decoding > 0 and "first", hold=0 if chunks else FOREVER)
