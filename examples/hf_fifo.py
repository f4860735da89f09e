from dataclasses import dataclass

from servesim.core import FOREVER, Chunk, Plan, Policy, View


@dataclass(frozen=True)
class HuggingFaceFifo(Policy):
    """The scheduler "fifo" of Hugging Face transformers' continuous batching: decodes first, then prompts in order."""

    max_batch_tokens: int = 1024  # tokens per step
    max_requests_per_batch: int = 128  # requests per step
    safety_margin: float = 0.15  # below this fraction of free blocks, a step accepts one prompt only

    def decide(self, view: View) -> Plan:
        tokens, rows = self.max_batch_tokens - view.decoding, self.max_requests_per_batch - view.decoding
        chunks, free = [], view.pool.free - view.decode_block_need
        for request in (*view.prefilling, *view.waiting):
            if tokens <= 0 or rows <= 0 or (chunks and free < self.safety_margin * view.pool.total):
                break
            size = min(request.pending, tokens)
            blocks = view.pool.blocks_for(request.cached + size) - request.blocks
            if blocks <= free:  # a request that finds no blocks is skipped
                chunks.append(Chunk(request, size))
                tokens, rows, free = tokens - size, rows - 1, free - blocks
        return Plan(chunks=chunks, decode=view.decoding > 0, decode_first=True, hold=0 if chunks else FOREVER)
