"""The shape of a model call: its rows, tokens and context, with the padding of a device."""

from __future__ import annotations

from collections.abc import Sequence

from servesim.core import Chunk, Shape

from .rules import EngineRules
from .step import Step, readmitted_as_decode


class Padding:
    """The padding buckets of a device."""

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


def runs_as_decode(chunk: Chunk, rules: EngineRules) -> bool:
    """Whether the last token of a prompt, or of a request that is computed again, runs as a decode row."""
    request = chunk.request
    if request.sampling is not None:
        return readmitted_as_decode(request)
    alone = chunk.tokens - chunk.drafts == 1 and request.pending == 1
    return alone and rules.one_token_decodes and rules.runs_as_decode(chunk)


def step_shape(step: Step, padding: Padding, rules: EngineRules) -> Shape:
    """Return the shape of a step."""
    decode_live, context, longest, drafts = step.decode_rows, step.context, step.longest, step.drafts
    may_decode, tracks_longest = rules.one_token_decodes or rules.sequence_groups, longest or not decode_live
    rows = padded = live = squares = cross = 0
    for chunk in step.chunks:
        request, tokens = chunk.request, chunk.tokens - chunk.drafts
        drafts += chunk.drafts
        if may_decode and (tokens == 1 or request.sampling is not None) and runs_as_decode(chunk, rules):
            cached = request.length - 1
            decode_live += 1
            context += cached
            if tracks_longest and cached > longest:
                longest = cached
            continue
        rows += 1
        live += tokens
        squares += tokens * tokens
        cross += tokens * request._cached
        padded += padding.pad_tokens(chunk.tokens) if padding.prefill_buckets else tokens
    decode_rows, extra = decode_live, step.plan.padding_rows
    if decode_live:
        if padding.decode_buckets or extra:
            decode_rows = max(padding.pad_rows(decode_live), decode_live + extra)
    elif extra:
        rows += extra
        padded += extra * padding.pad_tokens(max([chunk.tokens for chunk in step.chunks], default=0))
    copied = step.copied_blocks
    numbers = (rows, padded, live, squares, cross, decode_rows, decode_live, context, copied, longest, drafts)
    return tuple.__new__(Shape, numbers)  # `Shape(...)` runs Python code of `NamedTuple`, also if this is compiled
