"""Rules of vLLM V1 beside its scheduler: the prefix cache, and the order in which preempted requests release blocks."""

from __future__ import annotations

from typing import NamedTuple, Optional

from servesim.core import FOREVER, CacheDraft, Chunk, Plan, Policy, Preemption, Request
from servesim.core.native import mypyc_attr
from servesim.engine.caching_rules import CachingRules
from servesim.engine.cohort import Cohort
from servesim.engine.draft_cohort import DraftCohort
from servesim.engine.drafts import Drafts
from servesim.engine.kv_cache import KvCache
from servesim.engine.prefix_cache import PrefixCache
from servesim.engine.state import ServerState
from servesim.engine.step import Step

from .drafting import NO_DRAFTS, Drafting
from .group_cache import GroupCache, GroupDraft
from .group_cohort import GroupCohort
from .window_rules import WindowRules


class Unscheduled(NamedTuple):
    """What a step had given to a request before it preempts it; `Preemption.extra`. It matters for the prefix cache."""

    tokens: int = 0  # which the cache has
    blocks: int = 0  # that it would hold; 0: those of its tokens
    taken: int = 0  # blocks that the step had given to other requests since the last preemption
    frees_last: bool = False  # its blocks become free after those of the chunks are taken, not before


@mypyc_attr(allow_interpreted_subclasses=True)
class VLLMRules(CachingRules):
    """Rules of vLLM V1 and of the plug-ins on it."""

    def __init__(
        self, engine: str, validated_against: str, steps_in_flight: int, prefix_cache: bool, version: tuple[int, ...],
        drafting: Drafting = NO_DRAFTS, stages: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(engine, validated_against, steps_in_flight, prefix_cache)
        self.stages = stages
        self.drafting = drafting
        self.may_have_cache_groups = type(self) is VLLMRules  # the plug-ins have schedulers of their own
        self.foresees_ends = version >= (0, 11, 1)
        self.arrival_is_send_time = True  # the API server stamps it
        self.rejects_oversized = False  # the real scheduler does not check this; such a request blocks the queue
        self.rejects_full_prompts = True  # the input processor
        self.one_token_decodes = self.recomputes_last = True
        self.splits_answers = True
        self.slots_field, self.budget_fields = "max_num_seqs", ("max_num_batched_tokens",)
        self.empty_step = 0.001  # its loop sleeps after a step without a model call
        self.appends_all = version < (0, 24, 0)
        self.counts_lookups = version < (0, 27, 0)
        self.caps_windows = version >= (0, 20, 0)  # an admission counts only what a window needs of the whole prompt
        self.frees_computed = version < (0, 26, 0)  # a window also leaves behind blocks that a step in flight reads
        self.retains_all = version < (0, 29, 0)  # blocks with windows keep their names, if no interval is set
        self.counts_preempted_apart = version >= (0, 11, 1)

    def slots(self, policy: Policy) -> Optional[int]:
        if getattr(policy, "max_num_active_seqs", None):
            self.slots_field = "max_num_active_seqs"
        return super().slots(policy)

    def token_budget(self, policy: Policy) -> Optional[int]:
        budget: Optional[int] = self.setting(policy, self.budget_fields[0])
        return budget

    def runs_as_decode(self, chunk: Chunk) -> bool:
        """Whether it is the last token of a preempted request that has generated tokens."""
        return chunk.request._written > 0

    def start_plan(self, state: ServerState, plan: Plan) -> None:
        """Cache the blocks of earlier steps while preempted requests still have their tokens; then those of this step.

        These are in the order of the running queue, if some of them are of preempted requests.
        """
        cache = state.prefix_cache
        if isinstance(cache, GroupCache):
            cache.carry_out(plan.extra)  # none if the engine itself aborts requests
            return
        if cache is None or not plan.moves.preempt:
            return
        cache.update_all()
        tokens = {
            gone.request: gone.extra.tokens
            for gone in plan.moves.preempt
            if gone.extra is not None and gone.extra.tokens
        }
        if tokens:
            tokens.update({chunk.request: chunk.tokens for chunk in plan.chunks})
            for request in state.running:
                if request in tokens:
                    cache.schedule(request, tokens[request], 0)

    def end_plan(self, state: ServerState, plan: Plan) -> None:
        cache = state.prefix_cache
        if isinstance(cache, GroupCache):
            state.kv_use.absent = cache.absent
            if cache.in_step and (plan.chunks or plan.decode):
                cache.newest = {chunk.request: chunk.tokens for chunk in plan.chunks}

    def repeat_plan(self, state: ServerState) -> None:
        if isinstance(state.prefix_cache, GroupCache):
            state.prefix_cache.newest = {}

    def process_results(self, state: ServerState, step: Step, finished: list[Request], now: float) -> None:
        if state.view.engine and self.stages > 1:
            state.view.engine = {request for request in state.view.engine if state.newest_step_of(request) is not None}
        super().process_results(state, step, finished, now)
        cache = state.prefix_cache
        if isinstance(cache, GroupCache):
            state.kv_use.absent = cache.absent
            if state.flight is None:
                cache.newest = {}

    def may_load(self, state: ServerState, request: Request, blocks: int, started: int) -> bool:
        """Whether a request at the head of waiting has a slot and blocks that no prompt in work still needs."""
        if len(state.waiting) or not self.may_join(state):
            return False
        pool = state.pool
        for prompt in state.prefilling:
            blocks += pool.blocks_for(prompt.length) - prompt.blocks
        if len(state.running):
            blocks += int(getattr(state.policy, "watermark", 0.0) * (pool.total + 1))
        return blocks <= pool.free

    def preempt(self, state: ServerState, preemption: Preemption, now: float) -> int:
        before: Optional[Unscheduled] = preemption.extra
        preemption.request.drafts = 0
        if self.stages > 1 and state.newest_step_of(preemption.request) is not None:
            state.view.engine = {preemption.request, *(state.view.engine or ())}
        if isinstance(state.prefix_cache, GroupCache):  # `start_plan` has freed its blocks
            return state.preempt(preemption, now, self.drops_tokens_in_flight)
        if before is None and self.drafting is NO_DRAFTS:
            return super().preempt(state, preemption, now)
        tokens, blocks, taken, last = before or (0, 0, 0, False)
        if taken and isinstance(state.prefix_cache, PrefixCache):
            state.prefix_cache.take_first(taken)
        if self.drafting is not NO_DRAFTS:
            blocks = blocks or preemption.request.blocks
        return state.preempt(preemption, now, self.drops_tokens_in_flight, tokens, last, blocks)

    def make_cohort(self, block_size: int, has_groups: bool) -> Cohort:
        if self.drafting is NO_DRAFTS and not has_groups and self.stages == 1:
            return super().make_cohort(block_size, has_groups)
        make = GroupCohort if has_groups else DraftCohort
        cohort = make(block_size, Drafts(self.drafting.tokens), self.drafting.lookahead)
        cohort.enabled = self.stages == 1
        return cohort

    def make_cache(self, state: ServerState, host_blocks: int) -> tuple[Optional[KvCache], Optional[CacheDraft]]:
        if state.kv_cache_groups:
            interval = getattr(state.policy, "prefix_cache_retention_interval", 0)
            if self.retains_all and not interval:
                interval = None
            in_flight, longest = self.token_budget(state.policy) or 0, state.view.max_model_len or FOREVER
            if not self.caps_windows:
                in_flight = FOREVER
            elif not self.frees_computed:
                in_flight *= self.steps_in_flight
            rules = WindowRules(
                state.kv_cache_groups, state.pool.block_size, interval, self.drafting, in_flight, longest
            )
            return self._make_groups(state, rules)
        made = super().make_cache(state, host_blocks)
        cache = made[0]
        if isinstance(cache, PrefixCache) and (self.drafting is not NO_DRAFTS or self.stages > 1):
            cache.tree.only_registered = True
            cache.drops_last = self.drafting.drops_last_hit
            cache.unnamed = max(0, self.drafting.prefill_lookahead - 1)
        return made

    def _make_groups(self, state: ServerState, rules: WindowRules) -> tuple[Optional[KvCache], Optional[CacheDraft]]:
        state.limits.most_blocks = [kind.most for kind in rules.kinds for _ in kind.groups]
        cache = GroupCache(state.pool, rules, self.has_prefix_cache, self.counts_preempted_apart, self.appends_all)
        cohort, state.kv_use.groups = state.cohort, len(rules.windows)
        assert isinstance(cohort, GroupCohort)
        cohort.tables = cache
        if any(kind.reach < self.drafting.tokens for kind in rules.sliding):  # it may leave a block before it names it
            cohort.enabled = False
        if self.steps_in_flight > 1 and not self.frees_computed:
            cache.in_step = cohort.width
        return cache, GroupDraft(cache)
