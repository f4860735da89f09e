"""Rules of an installed engine: it counts its blocks and finds cached tokens itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from servesim.core import CacheDraft, Chunk, Plan, Policy, Preemption, Request
from servesim.engine.cohort import Cohort
from servesim.engine.draft_cohort import DraftCohort
from servesim.engine.drafts import Drafts
from servesim.engine.kv_cache import InstalledCache, KvCache
from servesim.engine.rules import NO_CACHE, EngineRules
from servesim.engine.state import ServerState
from servesim.engine.step import Step

SLOTS, BUDGET = "max_num_seqs", "max_num_batched_tokens"
FORESEES_ENDS = (0, 11, 1)  # first version that does not run a request again whose last token is in flight


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the release of a version such as 0.32.0rc1+cpu as numbers."""
    numbers = []
    for part in text.split("+")[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)


class InstalledRules(EngineRules):
    """Rules of an engine with these settings, which a worker process runs."""

    def __init__(self, title: str, settings: Mapping[str, Any]) -> None:
        validated = f"it is the scheduler of the installed {title}"
        super().__init__(f"the installed {title}", validated, settings["steps_in_flight"])
        self.stages = settings["stages"]
        self.foresees_ends = version_numbers(settings["version"]) >= FORESEES_ENDS
        self.arrival_is_send_time = True
        self.rejects_oversized = False
        self.rejects_full_prompts = True
        self.one_token_decodes = self.splits_answers = self.may_have_cache_groups = True
        self.empty_step = 0.001
        self.has_prefix_cache, self.drafts = settings["prefix_cache"], settings["drafts"]
        self.limits: dict[str, int] = {field: settings[field] for field in (SLOTS, BUDGET)}
        self.slots_field, self.budget_fields = SLOTS, (BUDGET,)

    def setting(self, policy: Policy, field: str) -> Any:
        return self.limits.get(field)

    def token_budget(self, policy: Policy) -> Optional[int]:
        return self.limits[BUDGET]

    def make_cohort(self, block_size: int, has_groups: bool) -> Cohort:
        if not (self.drafts or has_groups or self.stages > 1):
            return super().make_cohort(block_size, has_groups)
        cohort = DraftCohort(block_size, Drafts(self.drafts), 0)
        cohort.enabled = False  # every plan of an engine lists all requests
        return cohort

    def make_cache(self, state: ServerState, host_blocks: int) -> tuple[Optional[KvCache], Optional[CacheDraft]]:
        session, groups = state.view.state, list(state.kv_cache_groups)
        session.windows, session.verifies = groups, state.draft_cohort is not None
        if not (self.has_prefix_cache or groups):
            return NO_CACHE
        cache = InstalledCache(state.pool)
        cache.takes_blocks = len(groups) > 0  # only the engine knows how many
        return cache, None

    def preempt(self, state: ServerState, preemption: Preemption, now: float) -> int:
        preemption.request.drafts = 0
        return super().preempt(state, preemption, now)

    def process_results(self, state: ServerState, step: Step, finished: list[Request], now: float) -> None:
        super().process_results(state, step, finished, now)
        if step.plan.chunks:
            step.plan.state.note_results(step.verified)

    def runs_as_decode(self, chunk: Chunk) -> bool:
        return chunk.request._written > 0

    def end_plan(self, state: ServerState, plan: Plan) -> None:
        """Use the number of free blocks that the engine has counted, which is the extra of its plans."""
        if plan.extra is not None and isinstance(state.prefix_cache, InstalledCache):
            state.kv_use.tokens += state.prefix_cache.correct(plan.extra)
