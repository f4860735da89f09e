"""What a step time depends on, and the interface of a cost model."""

from __future__ import annotations

from typing import NamedTuple, Optional


class Shape(NamedTuple):
    """What a step's time depends on; padded is what the device runs, live is what was asked for."""

    prefill_rows: int = 0
    prefill_tokens: int = 0  # padded
    prefill_live: int = 0
    squares: int = 0  # sum of squared chunk lengths: attention inside the chunks
    cross: int = 0  # sum of chunk x context before it: attention to what was cached
    decode_rows: int = 0  # padded
    decode_live: int = 0
    context: int = 0  # sum of cached tokens the decoding rows read
    swapped: int = 0  # blocks copied to or from the host

    @property
    def kind(self) -> str:
        """What the step does: prefill, decode, mixed or swap."""
        if self.prefill_rows:
            return "mixed" if self.decode_rows else "prefill"
        return "decode" if self.decode_rows else "swap"


class StepCost:
    """Seconds a step takes."""

    @property
    def steady(self) -> bool:
        """Whether steps of one shape always take the same time."""
        return True

    def seconds(self, shape: Shape) -> float:
        """Return the duration of one step."""
        raise NotImplementedError

    def duration(self, shape: Shape) -> float:
        """Return the duration of one step, a decode-only one by the short cut: clocks agree to the last bit."""
        if shape.prefill_rows or shape.swapped:
            return self.seconds(shape)
        return self.decode(shape.decode_rows, shape.decode_live, shape.context)

    def decode(self, rows: int, live: int, context: int) -> float:
        """Return the duration of a decode-only step: the inner loop's short cut."""
        return self.seconds(Shape(decode_rows=rows, decode_live=live, context=context))

    def line(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        """Return a and b where `decode` is exactly a + b * context for such a batch; leaps are faster for it."""
        return None
