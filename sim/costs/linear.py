"""A cost model that is a sum of terms."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Optional

from servesim.core import Shape, StepCost
from servesim.core.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class LinearCost(StepCost):
    """Seconds of a step as a sum of terms; each field is the seconds per unit in its comment."""

    base: float = 0.0  # per step
    prefill: float = 0.0  # per step with prompts
    prefill_row: float = 0.0
    prefill_token: float = 0.0  # per token, padding included
    prefill_square: float = 0.0  # per squared token of a chunk
    prefill_cross: float = 0.0  # per token of a chunk x token cached before it
    decode_step: float = 0.0  # per step with decodes
    decode_row: float = 0.0  # per row, padding included
    decode_live: float = 0.0
    context: float = 0.0  # per cached token that is read
    swap_block: float = 0.0
    draft_token: Optional[float] = None  # per drafted token that is verified; None: as a prompt token
    experts: float = 0.0  # to read all experts of the model; a step reads those that its tokens use
    expert_share: float = 0.0  # not seconds: the share of the experts that a token uses

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through the constructor: nothing can set the fields of a compiled frozen object."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def seconds(self, shape: Shape) -> float:
        seconds = self.base
        if shape.prefill_rows:
            seconds += (
                self.prefill
                + self.prefill_row * shape.prefill_rows
                + self.prefill_token * shape.prefill_tokens
                + self.prefill_square * shape.squares
                + self.prefill_cross * shape.cross
            )
        if shape.decode_rows:
            seconds += (
                self.decode_step
                + self.decode_row * shape.decode_rows
                + self.decode_live * shape.decode_live
                + self.context * shape.context
            )
        if shape.drafts:
            seconds += (self.prefill_token if self.draft_token is None else self.draft_token) * shape.drafts
        seconds += self._experts(shape.prefill_tokens + shape.decode_rows + shape.drafts)
        return seconds + self.swap_block * shape.swapped

    def decode(self, rows: int, live: int, context: int) -> float:
        fixed, slope = self.linear_in_context(rows, live)
        return fixed + slope * context

    def verify(self, rows: int, live: int, context: int, drafts: int, longest: int) -> float:
        decode = self.decode_step + self.decode_row * rows + self.decode_live * live + self.context * context
        token = self.prefill_token if self.draft_token is None else self.draft_token
        return self.base + decode + token * drafts + self._experts(rows + drafts)  # in the order of `seconds`

    def linear_in_context(self, rows: int, live: int) -> tuple[float, float]:
        decode = self.decode_step + self.decode_row * rows + self.decode_live * live
        return self.base + decode + self._experts(rows), self.context

    def _experts(self, tokens: int) -> float:
        """Return the seconds to read the expected number of experts: every token draws its own."""
        return self.experts * (1.0 - (1.0 - self.expert_share) ** tokens) if self.experts else 0.0
