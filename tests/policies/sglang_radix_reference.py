"""SGLang's scheduler with its radix cache, restated token by token. The rules without it are in sglang_reference.py."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Optional

from ..engine.radix_cache_reference import Part, RadixTree
from .sglang_reference import Batch, Engine, Job


class RadixJob(Job):
    """A request with its text."""

    tokens: list[Hashable]  # of the prompt and of the whole answer
    part: Part  # its last node in the tree
    kept: int = 0  # tokens of it that are in the tree
    admitted: bool = False  # its nodes are locked


class RadixEngine(Engine):
    """One server."""

    has_tree = True

    def __init__(self, version: str, knobs: dict[str, Any], jobs: list[Job], cost: dict[str, int]) -> None:
        super().__init__(version, knobs, jobs, cost)
        self.tree = RadixTree(self.page, alike=not self.old)
        self.cached: list[list[Any]] = []

    @property
    def available(self) -> int:
        return self.free + self.tree.evictable

    def room(self, tokens: int) -> None:
        if self.free < tokens:
            self.pages += self.tree.evict(tokens if self.old else tokens - self.free) // self.page

    def write(self, batch: Batch, now: int, start: Optional[int]) -> None:
        super().write(batch, now, start)
        self.rows[-1].update(hits=self.cached, evictable=self.tree.evictable)
        self.cached = []

    # -- the tree -------------------------------------------------------------------------------------------------

    def unfinished(self, job: Any) -> None:
        part, had = self.tree.insert(job.tokens[: job.prefix])
        self.pages += (had - job.kept) // self.page
        self.tree.lock(part, 1)
        self.tree.lock(job.part, -1)
        job.part, job.kept = part, self.tree.whole(job.prefix)

    def finish(self, job: Any) -> None:
        """Keep an answer in the tree, and free the rest."""
        count = job.prompt + job.outs - 1 if self.old else job.stored
        _, had = self.tree.insert(job.tokens[:count])
        self.pages += (had - job.kept) // self.page + (self.ceil(count) - self.tree.whole(count)) // self.page
        job.stored = self.ceil(job.stored) - self.ceil(count)
        self.tree.lock(job.part, -1)

    def look_up(self, job: Any) -> None:
        job.part, job.prefix = self.tree.match(job.tokens[: job.prompt + job.outs - 1])

    def lock(self, job: Any, change: int) -> None:
        self.tree.lock(job.part, change)

    def use(self, job: Any) -> None:
        job.kept = job.stored = job.prefix
        if job.prefix:
            self.cached.append([job.id, job.prefix])

    def take_back(self, job: Any, others: int) -> None:
        self.pages += (self.ceil(job.stored) - job.kept) // self.page
        self.tree.lock(job.part, -1)
        self.pages += self.tree.evict(max(0, 20 * others - self.free)) // self.page
        job.stored = job.kept = 0

    # -- one turn -------------------------------------------------------------------------------------------------

    def choose(self) -> Optional[Batch]:
        if self.last is not None and self.last.cut is not None:
            self.unfinished(self.last.cut)
        return super().choose()

    def order(self) -> bool:
        kind = self.knobs.get("schedule_policy")
        super().order()
        if kind not in ("lpm", "dfs-weight") or (kind == "lpm" and len(self.waiting) > 128):
            return False
        noted: list[list[Hashable]] = []
        last: set[Job] = set()
        for job in self.waiting:
            tokens = job.tokens[: job.prompt + job.outs - self.old]
            job.part, job.prefix = self.tree.match(tokens)
            if job.prefix <= 32:
                if any(common(tokens, other) >= 32 for other in noted):
                    last.add(job)
                else:
                    noted.append(tokens)
        if kind == "lpm":
            self.waiting.sort(
                key=lambda job: float("inf") if job in last else -min(job.prefix, job.prompt + job.outs - 1)
            )
        else:
            self.waiting = self.tree.depth_first([(job, job.part) for job in self.waiting])
        return True


def common(tokens: list[Hashable], other: list[Hashable]) -> int:
    """Return how many tokens two texts share."""
    count = 0
    while count < min(len(tokens), len(other)) and tokens[count] == other[count]:
        count += 1
    return count
