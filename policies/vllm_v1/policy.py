"""vLLM V1: no prefill phase. Every step has one token budget, for running requests first, then for waiting ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from servesim.core import DECODE_PAST_FINISH, DECODE_UNTIL_FINISH, IDLE_PLAN, Plan, Request, View
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import prefilling_is_last

from .group_cache import GroupDraft
from .group_pass import GroupPass
from .pipeline_pass import PipelinePass
from .settings import VLLMSettings
from .speculation import DraftPass, only_decodes
from .step_pass import DECODE_ONCE, Pass


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLMV1(VLLMSettings):
    """The scheduler of vLLM V1, with the class defaults of 0.32."""

    def decide(self, view: View) -> Plan:
        groups = view.prefix_cache.cache if isinstance(view.prefix_cache, GroupDraft) else None
        if groups is not None or self.num_speculative_tokens:
            if only_decodes(self, view):
                return DECODE_PAST_FINISH
            return (DraftPass(self, view) if groups is None else GroupPass(self, view, groups)).run()
        if self.pipeline_parallel_size > 1:
            return PipelinePass(self, view).run()
        return self.schedule(view, self.max_num_batched_tokens)

    def schedule(self, view: View, budget: int) -> Plan:
        """Return the plan of a step with this token budget."""
        tokens, free = budget - view.decoding, view.pool.free - view.decode_block_need
        if tokens >= 0 and free >= 0 and not view.waiting and not view.prefilling:
            return DECODE_PAST_FINISH if view.decoding else IDLE_PLAN
        if tokens < 0 or free < 0 or not prefilling_is_last(view.running, view.prefilling):
            return self.schedule_in_order(view, view.running, budget)  # some may not run in this step, or be preempted
        left = self.make_pass(view, tokens, free)
        for request in view.prefilling:
            if left.room <= 0:
                break
            size = left.running_tokens(request)
            if size > 0:
                left.give(request, size, left.missing(request, size))
        if left.free < 0:
            return self.schedule_in_order(view, view.running, budget)
        chunks = list(left.scheduled.values())
        may_grow = bool(view.waiting) and left.admit(chunks)
        state = left.state()
        if chunks:
            return Plan(chunks=chunks, decode=view.decoding > 0 and "first", state=state)
        if not view.decoding:  # nothing runs, so nothing changes
            return IDLE_PLAN if view.state is None else Plan(state=view.state)
        plan = DECODE_ONCE if may_grow else DECODE_UNTIL_FINISH
        return plan if state is None else Plan(decode=True, hold=plan.hold, state=state)

    def schedule_in_order(self, view: View, running: Iterable[Request], budget: int) -> Plan:
        """Return the plan of a step with this token budget, with the running requests in this order."""
        return self.make_pass(view, budget, view.pool.free).run_in_order(list(running))

    def make_pass(self, view: View, tokens: int, free: int) -> Pass:
        """Return what is left for requests: tokens and blocks."""
        return Pass(self, view, tokens, free)
