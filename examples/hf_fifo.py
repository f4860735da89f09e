from dataclasses import dataclass

from servesim.core import FOREVER, CachedPrefix, Chunk, Plan, Policy, View
from servesim.engine.caching_rules import CachingRules


@dataclass(frozen=True)
class HuggingFaceFifo(Policy):
    """The scheduler "fifo" of Hugging Face transformers' continuous batching: decodes first, then prompts in order."""

    max_batch_tokens: int = 1024  # tokens per step
    max_requests_per_batch: int = 128  # requests per step
    safety_margin: float = 0.15  # below this fraction of free blocks, a step accepts one prompt only
    allow_block_sharing: bool = False  # requests with equal beginnings share KV blocks

    def rules(self) -> CachingRules:
        return CachingRules(caches=self.allow_block_sharing)

    def decide(self, view: View) -> Plan:
        tokens, rows = self.max_batch_tokens - view.decoding, self.max_requests_per_batch - view.decoding
        chunks, free = [], view.pool.free - view.decode_block_need
        cache, may_grow = view.prefix_cache, False
        if cache is not None:
            cache.start()
        for request in (*view.prefilling, *view.waiting):
            if tokens <= 0 or rows <= 0 or (chunks and free < self.safety_margin * view.pool.total):
                break
            prefix = CachedPrefix(0, 0, False, 0)
            if cache is not None and request.status == "waiting":
                prefix = cache.find(request, free)
                may_grow = may_grow or prefix.may_grow
            cached = prefix.blocks_in_cache * view.pool.block_size  # without blocks that this step fills
            size = min(request.pending - cached, tokens)
            blocks = view.pool.blocks_for(request.cached + cached + size) - request.blocks
            blocks -= prefix.blocks_in_cache - prefix.idle_blocks  # other requests hold these already
            if blocks <= free:  # a request that finds no blocks is skipped
                chunks.append(Chunk(request, size, cached=cached))
                tokens, rows, free = tokens - size, rows - 1, free - blocks
                if cache is not None and request.status == "waiting":
                    cache.admit(request, prefix, size)
        hold = 0 if chunks or may_grow else FOREVER
        return Plan(chunks=chunks, decode=view.decoding > 0 and "first", hold=hold)
