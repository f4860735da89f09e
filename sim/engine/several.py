"""The servers of a run, one or several: the totals of all of them count as those of the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .kv_cache import KvCache
from .loop import Loop
from .work_totals import KindTotals


class Servers:
    """The loops of the servers; here of one, which runs alone. The first server gets the totals of all."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        self.loops = list(loops)
        first = loops[0]
        self.server, self.policy = first.server, first.policy
        self.now = 0.0
        self.idle_s = 0.0  # seconds without a model call
        for loop in loops:
            self.share_totals(loop)

    def share_totals(self, loop: Loop) -> None:
        """Let a loop add to the gaps between tokens, which all servers share."""
        loop.server.token_gaps = self.server.token_gaps

    @property
    def size(self) -> int:
        """The number of servers; one that has crashed or restarted counts once."""
        return len(self.loops)

    @property
    def caches(self) -> list[KvCache]:
        """The prefix caches; the first gets the counts of all."""
        return [loop.server.prefix_cache for loop in self.loops if loop.server.prefix_cache is not None]

    def run(self) -> float:
        """Run until all requests are done. Return the time."""
        loop = self.loops[0]
        try:
            loop.run()
        finally:  # also if it is stuck
            self.now, self.idle_s = loop.now, loop.idle_s
        return self.now

    def metrics(self) -> dict[str, Any]:
        """Return what the results say about these servers beside the totals."""
        return {}

    def seconds_there(self) -> Sequence[float]:
        """Return for how many seconds each server was there; empty: during the whole run."""
        return ()

    @property
    def calls(self) -> int:
        """Model calls that have ended, of all servers."""
        return sum([loop.calls for loop in self.loops])

    def add_totals(self) -> dict[str, KindTotals]:
        """Add waits and counts of the caches to those of the first; return what the model calls computed."""
        work, self.server.waits.servers = self.server.work.by_kind(), self.size
        for cache in self.caches[1:]:
            self.caches[0].add_counts(cache)
        for loop in self.loops[1:]:
            self.server.waits.add(loop.server.waits, self.now)
            for kind, sums in loop.server.work.by_kind().items():
                work[kind].add(sums)
        return work
