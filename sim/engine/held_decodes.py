"""Equal decode steps of a plan that holds: rows, cost, context, blocks and times, for fast_forward.py."""

from __future__ import annotations

from typing import Final, Optional

MANY_BLOCKS: Final = 1 << 40  # more than any segment allocates; sums of a larger number would be slow


class DecodeCost:
    """The cost of a decode with a number of live rows."""

    __slots__ = ("fixed", "linear", "rows", "slope")

    def __init__(self, rows: int, linear: Optional[tuple[float, float]]) -> None:
        self.rows = rows  # with padding
        self.linear = linear is not None  # in the context
        self.fixed, self.slope = linear or (0.0, 0.0)  # seconds at context 0, and per context token


class HeldDecodes:
    """Equal decode steps, one after another: their rows, cost, context, blocks and times."""

    __slots__ = (
        "_first_free", "_free_sum", "_index", "_offsets", "_overlaps", "context", "cost", "decision", "end", "fixed",
        "free", "horizon", "live", "longest",
    )  # fmt: skip

    def __init__(self, offsets: list[int], overlaps: bool) -> None:
        self._offsets = offsets  # blocks that a step needs; see Cohort
        self._overlaps = overlaps  # a step is decided at the start of the one before it, not at its end
        self.cost = DecodeCost(0, None)
        self.live = 0  # decode rows without padding
        self.fixed = 0.0  # seconds of the next step at context 0
        self.context = 0  # cached tokens that the newest step reads
        self.longest = 0  # those of the row with most of them, as in Cohort
        self.decision = 0.0  # when the next step is decided
        self.end = 0.0  # of the newest step
        self.horizon = 0.0  # every step must be decided before it
        self.free = 0  # blocks that further steps can take
        self._first_free = 0
        self._free_sum = 0  # of these blocks, summed over the steps after the first one
        self._index = 0  # of the next step in the offsets

    def begin(self, live: int, cost: DecodeCost, context: int, start: float, end: float) -> None:
        """Begin with one step that has been decided."""
        self.live, self.cost, self.fixed, self.context = live, cost, cost.fixed, context
        self.decision, self.end = start if self._overlaps else end, end
        self.free = self._first_free = self._free_sum = 0

    def set_blocks(self, free: int, steps: int) -> None:
        """Set the blocks that steps after the first one can take; the cohort has counted this number of steps."""
        self.free = self._first_free = min(free, MANY_BLOCKS)
        self._index = -steps % len(self._offsets)

    def advance(self, count: int) -> int:
        """Run up to `count` further steps, each decided before the horizon and with its blocks. Return how many ran."""
        offsets, live, fixed, slope = self._offsets, self.live, self.fixed, self.cost.slope
        index, free, free_sum, context = self._index, self.free, self._free_sum, self.context
        decision, end, horizon, overlaps = self.decision, self.end, self.horizon, self._overlaps
        ran = 0
        while ran < count:
            needed = offsets[index]
            if decision >= horizon or needed > free:
                break
            index = (index or len(offsets)) - 1
            free -= needed
            free_sum += free
            context += live
            decision, end = end, end + (fixed + slope * context)
            if not overlaps:
                decision = end
            ran += 1
        self._index, self.free, self._free_sum, self.context = index, free, free_sum, context
        self.decision, self.end = decision, end
        return ran

    def steps_with_blocks(self, count: int, live: int) -> int:
        """Return how many of the next `count` steps of these rows have their blocks."""
        offsets, index, free, steps = self._offsets, self._index, self.free, 0
        if live * (count // len(offsets) + 1) <= free:
            return count
        while steps < count and offsets[index] <= free:
            free -= offsets[index]
            index = (index or len(offsets)) - 1
            steps += 1
        return steps

    def advance_one(self) -> float:
        """Run one further step, whose blocks are there. Return its seconds."""
        index = self._index
        self.free -= self._offsets[index]
        self._index = (index or len(self._offsets)) - 1
        self._free_sum += self.free
        self.context += self.live
        seconds = self.fixed + self.cost.slope * self.context
        end = self.end + seconds
        self.decision = self.end if self._overlaps else end
        self.end = end
        return seconds

    @property
    def lacks_blocks(self) -> bool:
        """Whether the blocks of the next step are missing."""
        return self._offsets[self._index] > self.free

    @property
    def taken(self) -> int:
        """Blocks that further steps have taken."""
        return self._first_free - self.free

    @property
    def last_needed(self) -> int:
        """Blocks that the newest step has taken."""
        return self._offsets[(self._index + 1) % len(self._offsets)]

    def more_blocks(self, further: int) -> int:
        """Return the blocks that further steps hold in addition to the first one, summed over the steps."""
        return further * self._first_free - self._free_sum
