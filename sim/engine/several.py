"""What several servers have in common: the totals of all of them count as those of the first."""

from __future__ import annotations

from collections.abc import Sequence

from .loop import Loop
from .work_totals import KindTotals


class Servers:
    """The loops of several servers. The first server gets the totals of all."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        self.loops = loops
        first = loops[0]
        self.server, self.policy = first.server, first.policy
        self.now = 0.0
        self.idle_s = 0.0  # seconds without a model call
        caches = [loop.server.prefix_cache for loop in loops if loop.server.prefix_cache is not None]
        self.caches = caches  # the first gets the counts of all
        for loop in loops:
            loop.server.token_gaps = first.server.token_gaps

    def run(self) -> float:
        """Run until all requests are done. Return the time."""
        raise NotImplementedError

    @property
    def calls(self) -> int:
        """Model calls that have ended, of all servers."""
        return sum([loop.calls for loop in self.loops])

    def add_totals(self) -> dict[str, KindTotals]:
        """Add waits and counts of the caches to those of the first; return what the model calls computed."""
        work = self.server.work.by_kind()
        for cache in self.caches[1:]:
            self.caches[0].add_counts(cache)
        for loop in self.loops[1:]:
            self.server.waits.add(loop.server.waits, self.now)
            for kind, sums in loop.server.work.by_kind().items():
                work[kind].add(sums)
        return work
