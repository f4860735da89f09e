"""Blocks of texts that a router remembers, least recently used first.

A router that remembers blocks of 4 characters has thousands of them per request. So an entry is a range of blocks that
follow one another in a text and were used together. Ranges lose blocks at their beginning only: there a shorter text
uses them again, and there the oldest ones are dropped, as one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .router import Run


class Range:
    """Blocks [start, end) of a run."""

    __slots__ = ("end", "key", "owners", "start")

    def __init__(self, key: int, start: int, end: int, owners: dict[int, float]) -> None:
        self.key = key
        self.start = start
        self.end = end
        self.owners = owners  # replica -> when it was sent them last


class RecentBlocks:
    """The blocks used last, up to a number."""

    def __init__(self) -> None:
        self.size = 0  # blocks
        self._recent: OrderedDict[Range, None] = OrderedDict()
        self._ranges: dict[int, list[Range]] = {}  # of a run, in the order of the text

    def ranges(self, run: Run) -> Sequence[Range]:
        """Return the ranges of a run; some may be behind its end."""
        return self._ranges.get(run.key, ())

    def use(self, runs: Sequence[Run], owner: int, now: float, most: int) -> None:
        """Use the blocks of a text from the first to the last one, and drop the oldest ones above `most`."""
        for key, blocks in runs:
            end = 0
            while end < blocks:
                end = self._use(key, end, blocks, owner, now)
                while self.size > most:
                    self._drop(self.size - most)

    def _use(self, key: int, start: int, limit: int, owner: int, now: float) -> int:
        """Use the blocks from `start` on that are alike: all known and used together, or all new. Return their end."""
        ranges = self._ranges.setdefault(key, [])
        place = 0
        while place < len(ranges) and ranges[place].end <= start:
            place += 1
        old = ranges[place] if place < len(ranges) else None
        if old is None or old.start > start:
            end = limit if old is None else min(limit, old.start)
            used = Range(key, start, end, {owner: now})
            self.size += end - start
            ranges.insert(place, used)
        elif old.end <= limit:
            used, end = old, old.end
            used.owners[owner] = now
        else:
            used, end = Range(key, start, limit, {**old.owners, owner: now}), limit
            old.start = limit
            ranges.insert(place, used)
        self._recent[used] = None
        self._recent.move_to_end(used)
        return end

    def _drop(self, blocks: int) -> None:
        """Drop the oldest blocks, at most those of one range."""
        oldest = next(iter(self._recent))
        gone = min(blocks, oldest.end - oldest.start)
        oldest.start += gone
        self.size -= gone
        if oldest.start == oldest.end:
            del self._recent[oldest]
            ranges = self._ranges[oldest.key]
            ranges.remove(oldest)
            if not ranges:
                del self._ranges[oldest.key]
