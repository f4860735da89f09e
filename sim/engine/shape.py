"""The shape of a step, with the padding that the device adds."""

from __future__ import annotations

from collections.abc import Sequence

from servesim.core import Shape, Traits

from .step import Step


class Padding:
    """The padding buckets of a device (llm-serving: gears)."""

    def __init__(self, prefill_buckets: Sequence[int] = (), decode_buckets: Sequence[int] = ()) -> None:
        self.prefill_buckets = tuple(sorted(prefill_buckets))  # tokens per row; the bucket must exceed the prompt
        self.decode_buckets = tuple(sorted(decode_buckets))  # rows per batch

    def pad_tokens(self, tokens: int) -> int:
        """Return the padded length of a chunk."""
        for bucket in self.prefill_buckets:
            if bucket > tokens:
                return bucket
        return max(tokens, self.prefill_buckets[-1]) if self.prefill_buckets else tokens

    def pad_rows(self, rows: int) -> int:
        """Return the padded number of decoding rows."""
        for bucket in self.decode_buckets:
            if bucket >= rows:
                return bucket
        return rows


NO_PADDING = Padding()


def step_shape(step: Step, padding: Padding, traits: Traits) -> Shape:
    """Return the shape of a step."""
    chunks, decode_live, context = step.chunks, step.decode_rows, step.context
    if traits.last_token_decodes:
        last = [c.request for c in chunks if c.tokens == 1 and c.request.pending == 1]
        chunks = [chunk for chunk in chunks if chunk.request not in last]
        decode_live += len(last)
        context += sum(request._cached for request in last)
    live = squares = cross = 0
    for chunk in chunks:
        tokens, cached = chunk.tokens, chunk.request._cached
        live += tokens
        squares += tokens * tokens
        if cached:
            cross += tokens * cached
    rows, padded, decode_rows, extra = len(chunks), live, decode_live, step.plan.padding_rows
    if padding.prefill_buckets:
        padded = sum(padding.pad_tokens(chunk.tokens) for chunk in chunks)
    if decode_live:
        if padding.decode_buckets or extra:
            decode_rows = max(padding.pad_rows(decode_live), decode_live + extra)
    elif extra:
        rows += extra
        padded += extra * padding.pad_tokens(max((chunk.tokens for chunk in chunks), default=0))
    return Shape(rows, padded, live, squares, cross, decode_rows, decode_live, context, step.copied_blocks)
