"""What a step's time depends on, read off a step: padded as the device pads it."""

from __future__ import annotations

from collections.abc import Sequence

from servesim.core import Shape, Traits

from .step import Step


class Padding:
    """What a device runs beside what it was asked for: prompts padded to a gear, decodes to a batch gear."""

    def __init__(self, prefill: Sequence[int] = (), decode: Sequence[int] = ()) -> None:
        self.prefill = tuple(sorted(prefill))  # row lengths; a prompt takes the first one longer than itself
        self.decode = tuple(sorted(decode))  # batch sizes; a batch takes the first that holds it

    def tokens(self, tokens: int) -> int:
        """Return the padded length of a prompt part."""
        for gear in self.prefill:
            if gear > tokens:
                return gear
        return max(tokens, self.prefill[-1]) if self.prefill else tokens

    def rows(self, rows: int) -> int:
        """Return the padded number of decoding rows."""
        for gear in self.decode:
            if gear >= rows:
                return gear
        return rows


NO_PADDING = Padding()


def shape_of(step: Step, padding: Padding, traits: Traits) -> Shape:
    """Return what a step's time depends on."""
    chunks, decoders, context = step.chunks, step.decoders, step.context
    if traits.last_token_decodes:
        alone = [c.request for c in chunks if c.tokens == 1 and c.request.pending == 1 and c.request._cached]
        chunks = [chunk for chunk in chunks if chunk.request not in alone]
        decoders += len(alone)
        context += sum(request._cached for request in alone)
    live = squares = cross = 0
    for chunk in chunks:
        part, cached = chunk.tokens, chunk.request._cached
        live += part
        squares += part * part
        if cached:
            cross += part * cached
    rows, tokens, decode_rows, extra = len(chunks), live, decoders, step.plan.padding
    if padding.prefill:
        tokens = sum(padding.tokens(chunk.tokens) for chunk in chunks)
    if decoders:
        if padding.decode or extra:
            decode_rows = max(padding.rows(decoders), decoders + extra)
    elif extra:
        rows += extra
        tokens += extra * padding.tokens(max((chunk.tokens for chunk in chunks), default=0))
    return Shape(rows, tokens, live, squares, cross, decode_rows, decoders, context, step.swapped)
