"""Rules of SGLang beside its scheduler: the radix cache, the order of results, tokens in flight that are dropped."""

from __future__ import annotations

from copy import copy
from operator import attrgetter
from typing import Any, Callable, Final, NamedTuple, Optional

from servesim.core import CacheDraft, Plan, Policy, Preemption, Request
from servesim.engine.kv_cache import KvCache
from servesim.engine.rules import NO_CACHE, EngineRules
from servesim.engine.state import ServerState
from servesim.engine.step import Step

from .radix_cache import RadixCache
from .radix_draft import RadixDraft

RESERVED_TOKENS: Final = 512  # num_reserved_decode_tokens: room of a request for its next tokens

# Requests that finished since the last decode step was decided, and their positions in the running queue. Inserted
# there in this order, they are where they were. Newest first; without those of a prefill, unless the next step was
# decided before the prefill returned. SGLang's policy finds them in `View.engine`.
Ended = list[tuple[int, Request]]


class CacheUse(NamedTuple):
    """What a step does to the radix cache before all else; `Plan.extra`."""

    lookups: tuple[tuple[Request, int], ...]  # requests that the scheduler looked up, and their tokens: counts as use
    make_room: int = 0  # evict if fewer blocks than these are free


class SGLangRules(EngineRules):
    """Rules of SGLang."""

    def __init__(self, version: str, is_old: bool, radix_cache: bool, steps_in_flight: int) -> None:
        super().__init__(f"SGLang {version}", f"recordings of the real scheduler of {version}", steps_in_flight)
        self.is_old = is_old  # 0.4.6
        self.block_size = 1
        self.has_prefix_cache = radix_cache
        self.drops_tokens_in_flight = self.loads_first = True
        self._late: dict[Step, int] = {}  # blocks of finished requests that are free when a step returns

    def make_cache(self, state: ServerState, host_blocks: int) -> tuple[Optional[KvCache], Optional[CacheDraft]]:
        if not self.has_prefix_cache:
            return NO_CACHE
        cache = RadixCache(state.pool, evicts_need=self.is_old)
        return cache, RadixDraft(cache)

    def waiting_key(self, policy: Policy) -> Callable[[Request], Any]:
        """Return the sort key. Requests with equal keys stay in the order in which they join the queue."""
        return policy.sort_key

    def token_budget(self, policy: Policy) -> Optional[int]:
        budget: Optional[int] = self.setting(policy, self.budget_fields[0])
        return budget

    def start_plan(self, state: ServerState, plan: Plan) -> None:
        use: Optional[CacheUse] = plan.extra
        cache = state.prefix_cache
        if use is None or cache is None:
            return
        for request, tokens in use.lookups:
            cache.look_up(request, tokens)
        if use.make_room:
            cache.make_room(use.make_room)

    def preempt(self, state: ServerState, preemption: Preemption, now: float) -> int:
        """Preempt a request. Then evict until `extra` blocks are free."""
        copied = super().preempt(state, preemption, now)
        if preemption.extra and state.prefix_cache is not None:
            state.prefix_cache.evict(preemption.extra - state.pool.free)
        return copied

    def launch_decodes(self, state: ServerState) -> None:
        if state.view.engine:
            state.view.engine = None

    def process_results(self, state: ServerState, step: Step, finished: list[Request], now: float) -> None:
        """Finish requests, and cache the prompts that the step has completed."""
        if self._late:
            late = self._late.pop(step, 0)
            state.pool.free += late
            state.pool.lost -= late
        if finished:
            self._list_ended(state, step, finished)
        cache = state.prefix_cache
        if cache is None:
            super().process_results(state, step, finished, now)
            return
        results = step.sampled + [request for request in finished if request not in step.sampled]
        if not state.overlaps and len(results) > 1:  # otherwise prompts are first in a batch
            results.sort(key=attrgetter("_admission"))
        for request in results:
            if request in finished:
                self.finish(state, request, now, step.fails)
            else:
                known = request.prompt + request.written - request.in_flight - 1  # without the token of this step
                state.kv_use.tokens += cache.keep(request, known)

    def _list_ended(self, state: ServerState, step: Step, finished: list[Request]) -> None:
        """Add requests that have finished to `View.engine`."""
        ended = [
            (state.running.position(request), request)
            for request in finished
            if request.status == "running" and (state.overlaps or request not in step.sampled)  # a failed one may wait
        ]
        if ended:
            ended.sort()
            state.view.engine = ended + (state.view.engine or [])

    def finish(self, state: ServerState, request: Request, now: float, failed: bool) -> None:
        state.take_out(request)
        state.mark_finished(request, now, failed)
        unused = state.unused_tokens(request)
        if unused and self.is_old:
            self._keep_unused_block(state, request)
        elif state.prefix_cache is not None:
            unused = 0  # the cache knows the token after the last one
        state.free_blocks(request, unused)

    def _keep_unused_block(self, state: ServerState, request: Request) -> None:
        """Keep the block that only the token after the last one uses, until its step returns."""
        late = request._blocks - state.pool.blocks_for(request._cached - 1)
        request._blocks -= late
        state.pool.lost += late
        assert state.flight is not None
        self._late[state.flight] = self._late.get(state.flight, 0) + late

    def before_decision(self, state: ServerState, step: Step) -> None:
        """Cache the prompts that the newest step computes in part."""
        cache = state.prefix_cache
        if cache is not None and len(state.prefilling):
            for chunk in step.chunks:
                if chunk.request._in_prefilling:
                    state.kv_use.tokens += cache.keep(chunk.request, chunk.request._cached)

    def before_prefills(self, state: ServerState) -> None:
        """Try admissions at every turn: no request of a prefill server decodes, after which others would be tried."""
        kept: Any = state.view.state
        if kept.batch_is_full:
            state.view.state = kept = copy(kept)
            kept.batch_is_full = False

    def may_load(self, state: ServerState, request: Request, blocks: int, started: int) -> bool:
        """Whether there is a slot, and the prompt fits beside what the requests here may still generate."""
        slots, others = self.slots(state.policy), len(state.running) + len(state.loading)
        if slots is not None and others >= slots:
            return False
        pool, clip = state.pool, self.setting(state.policy, "clip_max_new_tokens")
        tokens = sum([other.length for other in state.running])
        longest = max([other.prompt + min(other.max_tokens, clip) - tokens for other in state.running], default=0)
        reserved = max(RESERVED_TOKENS * (others + len(state.waiting)), longest)
        reserved += sum([other.length for other in state.waiting])  # retracted
        return request.prompt <= (pool.free + pool.evictable) * pool.block_size - reserved

    def live_refusal(self) -> Optional[str]:
        if self.has_prefix_cache:
            return "policy: a live run has no radix cache, expected policy.disable_radix_cache: true"
        return None
