"""The server of a policy: its state, the rules of its engine, and its length and memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from servesim.core import FOREVER, BlockPool, Policy, Request

from .groups import Group
from .pipeline import Pipeline
from .queues import FifoQueue, RequestQueue, SortedQueue
from .rules import rules_of
from .state import ServerState
from .waits import Waits


class Server(ServerState):
    """A server. It decides only what an engine decides without its scheduler: which requests can never run."""

    def __init__(
        self,
        policy: Policy,
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        max_model_len: Optional[int] = None,
        host_cache_blocks: int = 0,
        kv_cache_groups: Sequence[Optional[int]] = (),
    ) -> None:
        self.name = ""  # in a fleet: that of its replica
        self.rules = rules = rules_of(policy)
        usable = blocks - rules.reserved_blocks if policy.uses_block_pool else FOREVER
        waiting: RequestQueue = SortedQueue(rules.waiting_key(policy)) if policy.is_sorted else FifoQueue()
        super().__init__(
            policy, BlockPool(usable, block_size, host_blocks), waiting, rules.running_order, max_model_len,
            rules.make_cohort(block_size, len(kv_cache_groups) > 0),
        )  # fmt: skip
        self.limits.rejects_oversized = rules.rejects_oversized
        self.limits.rejects_full_prompts, self.limits.max_prompt = rules.rejects_full_prompts, rules.max_prompt
        self.kv_cache_groups = kv_cache_groups
        self.prefix_cache, self.view.prefix_cache = rules.make_cache(self, host_cache_blocks)
        self.waits = Waits(rules.slots(policy), rules.token_budget(policy))
        depth = rules.steps_in_flight
        assert depth in (1, 2) or rules.stages > 1, f"expected 1 or 2 steps in flight, got {depth}"
        assert depth == 1 or not rules.sequence_groups, "steps in flight need one sequence per request"
        self.pipeline = Pipeline(rules.stages) if rules.stages > 1 else None
        self.overlaps = depth > 1
        self.foresees_ends = self.overlaps and rules.foresees_ends
        self.ends_in_batch_order = self.overlaps or self.prefix_cache is not None or self.drafts is not None
        if self.draft_cohort is not None:
            self.draft_cohort.cache, self.draft_cohort.overlaps = self.prefix_cache, self.overlaps
            if max_model_len is not None:
                self.draft_cohort.max_model_len = max_model_len

    def submit(self, request: Request, now: float, visible_at: float) -> None:
        """Add an arrival to waiting, or reject it if it can never run. Its queueing time starts at `visible_at`."""
        if self.accept(request, now, visible_at):
            self.add_to_waiting(request)

    def accept(self, request: Request, now: float, visible_at: float) -> bool:
        """Set the times and the limits of an arrival. Return whether it can run; otherwise it is done."""
        request.visible_at, request.state_since, request.received = visible_at, visible_at, now
        request.arrival = request.sent if self.rules.arrival_is_send_time else visible_at
        request.max_tokens = most = self.limits.most_tokens(request)
        if request.stop_at > most:
            request.stop_at = most
        if reason := self.limits.rejection_reason(request):
            self.finish_unserved(request, now, "refused", reason)
            return False
        if request.fails_at_token is not None:
            self.may_fail = True
            if self.draft_cohort is not None:
                self.draft_cohort.enabled = False
                self.draft_cohort.leave_all()
        if request.sampling is not None:
            assert self.rules.sequence_groups, "this engine runs every answer as a request of its own"
            self.view.has_groups = True
            request.sampling = Group(request.sampling, request, self.pool, self.kv_use)
        return True

    def check(self) -> None:
        super().check()
        for request in self.waiting:
            self.rules.check_waiting(request)
