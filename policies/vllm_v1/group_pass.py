"""The decision of vLLM V1 with KV cache groups: the passes of speculation.py, with the blocks of a cache of groups."""

from __future__ import annotations

from operator import attrgetter
from typing import Optional

from servesim.core import CachedPrefix, Chunk, Plan, Request, View

from .group_cache import LEAVE, SLIDE, TAKE, Change, GroupCache
from .settings import VLLMSettings
from .speculation import DraftPass
from .window_rules import Hit


class GroupPass(DraftPass):
    """One decision, which lists the changes of the cache in their order."""

    def __init__(self, policy: VLLMSettings, view: View, cache: GroupCache, one_by_one: bool = False) -> None:
        super().__init__(policy, view, one_by_one)
        self.cache = cache
        self.planned: list[Change] = []
        self.changes = self.planned
        self.hit: Optional[Hit] = None  # of the waiting request that is tried

    def run(self) -> Plan:
        self.cache.start_draft()
        try:
            plan = super().run()
        except BaseException:
            self.cache.roll_back()
            raise
        if plan.extra is self.planned:
            self.cache.end_draft(self.planned)
        return plan

    def run_one_by_one(self) -> Plan:
        return GroupPass(self.policy, self.view, self.cache, one_by_one=True).run()

    def take_decodes(self) -> bool:
        tokens, due = 1 + self.drafting.tokens, self.cache.due
        for request in sorted(due, key=attrgetter("_admission")) if len(due) > 1 else due:
            missing = self.missing(request, tokens)
            if missing > self.free:
                self.cache.start_draft()
                self.planned.clear()
                self.free = self.cache.free
                return False
            self.take(request, tokens, missing)
        return True

    def change(self, change: Change) -> None:
        self.planned.append(change)
        self.cache.make(change)
        self.free = self.cache.free

    def missing(self, request: Request, tokens: int) -> int:
        cache, cached, size = self.cache, request.cached, self.view.pool.block_size
        table, processed = cache.tables[request], cache.processed(request)
        for kind in cache.rules.sliding:
            if processed - kind.reach >= (table.gone[kind.groups[0]] + 1) * size:
                self.change(Change(SLIDE, request, processed))
                break
        if cached + tokens + self.drafting.lookahead <= table.length * size:
            return 0
        return max(0, self.blocks(cached + tokens) - table.length) * len(table.groups)

    def take(self, request: Request, tokens: int, missing: int) -> None:
        cache, known = self.cache, min(request.cached + tokens, request.length) - request.in_flight
        if missing or cache.full_blocks(known) > cache.tables[request].named:
            self.change(Change(TAKE, request, known, self.blocks(request.cached + tokens)))

    def release(self, victim: Request, tokens: int, blocks: int) -> None:
        if victim.in_flight:  # the blocks that its last step has filled get names when this step returns
            self.change(Change(TAKE, victim, self.cache.returned(victim)))
        self.change(Change(LEAVE, victim))

    def find(self, request: Request) -> CachedPrefix:
        self.hit = hit = self.cache.find(request)
        return CachedPrefix(hit.blocks * self.view.pool.block_size, self.cache.idle_of(request, hit), False, 0)

    def admission_blocks(self, request: Request, prefix: CachedPrefix, blocks: int, is_whole: bool) -> int:
        hit, need = self.hit, prefix.idle_blocks
        assert hit is not None
        for kind in self.cache.rules.kinds:
            most = min(blocks, kind.most) if is_whole else blocks
            need += max(0, most - hit.blocks) * len(kind.groups)
        return need

    def hold(self, chunk: Chunk, prefix: CachedPrefix, taken: int) -> None:
        known = prefix.tokens + chunk.tokens - chunk.drafts
        self.change(Change(TAKE, chunk.request, known, chunk.blocks, self.hit))
