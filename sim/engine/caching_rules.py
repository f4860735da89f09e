"""Rules of an engine with a prefix cache of reference-counted blocks (prefix_cache.py)."""

from __future__ import annotations

from typing import Optional

from servesim.core import CacheDraft
from servesim.core.native import mypyc_attr

from .block_tree import BlockTree
from .cache_draft import Draft
from .host_cache import HostCache
from .kv_cache import KvCache
from .prefix_cache import PrefixCache
from .rules import NO_CACHE, EngineRules
from .state import ServerState


@mypyc_attr(allow_interpreted_subclasses=True)
class CachingRules(EngineRules):
    """Rules of an engine that has this cache, or has it switched off."""

    def __init__(
        self, engine: str = "", validated_against: str = "not validated", steps_in_flight: int = 1, caches: bool = True
    ) -> None:
        super().__init__(engine, validated_against, steps_in_flight)
        self.has_prefix_cache = self.may_have_host_cache = caches
        self.appends_all = True  # when a request ends, its partly filled blocks go to the back of the free list, too
        self.counts_lookups = False  # its statistics count lookups, not admissions
        self.counts_preempted_apart = True  # and those of preempted requests apart

    def make_cache(self, state: ServerState, host_blocks: int) -> tuple[Optional[KvCache], Optional[CacheDraft]]:
        if not self.has_prefix_cache:
            return NO_CACHE
        cache = PrefixCache(
            state.pool, state.cohort, self.appends_all, self.counts_lookups, self.counts_preempted_apart
        )
        if host_blocks:
            cache.host = HostCache(host_blocks, BlockTree(state.pool.block_size, state.cohort))
        return cache, Draft(cache)
