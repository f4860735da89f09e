"""The shape of a step, and the interface of a cost model that predicts its duration from the shape."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from .errors import BadInput
from .limits import MAX_STEP, is_number
from .native import keep_compiled_fields, mypyc_attr


class Shape(NamedTuple):
    """The numbers that the duration of a step depends on. Padded counts include padding, live counts do not."""

    prefill_rows: int = 0  # padded
    prefill_tokens: int = 0  # padded
    prefill_live: int = 0  # tokens
    squares: int = 0  # sum of tokens ** 2 over the chunks: attention inside a chunk
    cross: int = 0  # sum of tokens * cached over the chunks: attention to tokens cached before
    decode_rows: int = 0  # padded
    decode_live: int = 0  # rows
    context: int = 0  # sum of cached tokens that the decoding rows read
    swapped: int = 0  # KV blocks copied to or from the host
    longest: int = 0  # cached tokens of the decoding row that has most of them; 0: not known
    drafts: int = 0  # tokens that decoding rows verify beside their own one

    @property
    def kind(self) -> str:
        """The kind of step: prefill, decode, mixed or swap."""
        if self.prefill_rows:
            return "mixed" if self.decode_rows else "prefill"
        return "decode" if self.decode_rows else "swap"


@mypyc_attr(allow_interpreted_subclasses=True)
class StepCost:
    """A cost model: predicts the seconds of a step."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        keep_compiled_fields(cls)

    @property
    def deterministic(self) -> bool:
        """Whether two steps of one shape always take the same time."""
        return True

    @property
    def reads_longest(self) -> bool:
        """Whether the time of a step depends on the longest context of its decoding rows. A server then keeps it."""
        return False

    def seconds(self, shape: Shape) -> float:
        """Return the predicted seconds of a step. Subclasses implement this."""
        raise NotImplementedError

    def duration(self, shape: Shape) -> float:
        """Return the seconds of a step. It uses `decode` if it can, as the clock does: equal to the last digit."""
        if shape.prefill_rows or shape.swapped or shape.drafts:
            return self.seconds(shape)
        if shape.longest:
            return self.decode_unequal(shape.decode_rows, shape.decode_live, shape.context, shape.longest)
        return self.decode(shape.decode_rows, shape.decode_live, shape.context)

    def decode(self, rows: int, live: int, context: int) -> float:
        """Return the seconds of a decode-only step. A subclass may override it with faster code of the same result."""
        return self.seconds(Shape(decode_rows=rows, decode_live=live, context=context))

    def verify(self, rows: int, live: int, context: int, drafts: int, longest: int) -> float:
        """Return the seconds of a decode-only step that verifies drafts. A subclass may override it like `decode`.

        `longest` is 0 if it is not known.
        """
        shape: Shape = tuple.__new__(Shape, (0, 0, 0, 0, 0, rows, live, context, 0, longest, drafts))  # faster
        return self.seconds(shape)

    def decode_unequal(self, rows: int, live: int, context: int, longest: int) -> float:
        """Return the seconds of a decode-only step whose longest context is known. Needed if `reads_longest`."""
        return self.decode(rows, live, context)

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        """Return (a, b) if `decode` is exactly a + b * context for this batch, else None. This is faster."""
        return None


def check_seconds(cost: StepCost, seconds: Any) -> None:
    """Raise BadInput if the step time of a cost model is not a finite number of at least 0 seconds."""
    if not is_number(seconds, 0.0, MAX_STEP):
        name = type(cost).__name__
        raise BadInput(f"cost model {name}: expected a step time of at least 0 s and finite, got {seconds!r}")
