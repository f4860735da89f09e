"""vLLM v0: prefill first. A step runs either prompts or decodes. The last running request is preempted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Optional

from servesim.core import (
    FOREVER,
    IDLE_PLAN,
    Chunk,
    Hold,
    Int0,
    Int1,
    Plan,
    Preemption,
    Queue,
    Rejection,
    Reorder,
    Request,
    View,
    require_effect,
)
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import budget_refusals, priority_key

from .common import BlockPlan, VLLMv0, VLLMv0Rules, seats_of

# vLLM's block manager requires one free block during a decode step, even if no request uses it.
DECODE_KEEP_ONE_FREE: Final = Plan(decode=True, hold=Hold(keep_free=1))
DECODE_PAST_FINISH_KEEP_ONE_FREE: Final = Plan(decode=True, hold=Hold(keep_free=1, past_finish=True))


class PrefillResult(NamedTuple):
    """The waiting requests that a step admits or ignores (rejects), and the state of the delay factor."""

    chunks: Sequence[Chunk] = ()
    ignored: Sequence[Rejection] = ()
    state: Any = None
    wake_at: Optional[float] = None


class PriorityPreemption(NamedTuple):
    """The sorted queues, and the requests that the head of waiting preempts."""

    running: list[Request]
    waiting: list[Request]
    victims: list[Request]
    priority_inversion: bool  # a running request sorts after the head of waiting


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLM(VLLMv0):
    """The default scheduler of vLLM v0. The defaults are those of 0.8.5; other versions are presets."""

    max_num_batched_tokens: Optional[Int1] = None  # prompt tokens per step; null: max_model_len, at least 2048
    padded_prefill: bool = False  # prompts of a step are padded to the longest, and padding counts as tokens (0.3.3)
    max_paddings: Optional[Int0] = 256  # maximum padding tokens per step (with padded_prefill)
    ignored_step: bool = False  # a step that ignores (rejects) prompts and admits none runs no model call (<= 0.4.0)
    # fcfs, or priority (>= 0.6.2): the head of waiting preempts requests that sort after it
    policy: Literal["fcfs", "priority"] = "fcfs"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_effect(self, self.policy == "fcfs" or self.order == "priority", "order: priority", "aging")
        if self.policy == "priority" and self.preemption_mode == "swap":  # vLLM ends with an assertion
            raise ValueError("preemption_mode: expected recompute or null with policy: priority, got 'swap'")

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = max(2048, max_model_len or 0)
        return budget_refusals(budget, self.max_num_seqs, True, max_model_len)

    def rules(self) -> VLLMv0Rules:
        rules = VLLMv0Rules(
            "vLLM v0, 0.3.3 to 0.9.2, without chunked prefill",
            "recordings of the real schedulers of 0.3.3, 0.4.0, 0.4.2, 0.5.0, 0.6.1 and 0.8.5",
            self.has_sequence_groups,
        )
        rules.running_order = "arrival" if self.sort_running and self.policy == "fcfs" else "admission"
        return rules

    def decide(self, view: View) -> Plan:
        pool, fcfs_without_delay = view.pool, self.delay_factor == 0 and self.policy == "fcfs"
        free = pool.free - view.decode_block_need
        if fcfs_without_delay and free > 0 and not (view.waiting or view.swapped or view.has_groups):
            return DECODE_PAST_FINISH_KEEP_ONE_FREE if view.decoding else IDLE_PLAN
        if not (view.waiting or view.running or view.swapped):
            return Plan(state=view.state)
        prompts = PrefillResult(state=view.state)
        if not view.swapped and (view.waiting or self.delay_factor > 0):
            prompts = self._schedule_prefills(view)
            if prompts.chunks or (prompts.ignored and self.ignored_step):
                return Plan(chunks=prompts.chunks, reject=prompts.ignored, state=prompts.state)
        if self.policy == "priority":
            return self._decode_by_priority(view, prompts)
        # free == 0 is enough if the last request takes the last block: then every request still finds a free block.
        if view.decoding and (
            view.has_groups or (free <= 0 and not (free == 0 and view.running[-1].cached % pool.block_size == 0))
        ):
            preempt = self._append_or_preempt_all(view, view.running, pool.free).preempt
            if preempt:
                return self._decode_plan(prompts, 0, preempt=preempt, decode=len(preempt) < len(view.running))
        if view.swapped:
            return self._swap_in(view, prompts, free, view.running)
        if fcfs_without_delay and not prompts.ignored:
            return DECODE_KEEP_ONE_FREE if view.decoding else IDLE_PLAN
        return self._decode_plan(prompts, 0 if prompts.ignored else FOREVER, decode=view.decoding > 0)

    def token_budget(self, view: View) -> int:
        """Return the maximum number of tokens per step."""
        return self.max_num_batched_tokens or max(view.max_model_len or 0, 2048)

    def _schedule_prefills(self, view: View) -> PrefillResult:
        """Admit from the head of waiting until tokens, blocks or requests are used up."""
        pool, free, watermark_blocks = view.pool, view.pool.free, self.watermark_blocks(view.pool)
        token_budget = self.token_budget(view)
        max_length = token_budget if view.max_model_len is None else min(token_budget, view.max_model_len)
        seats = self.max_num_seqs - seats_of(view, view.running)
        gate = self.delay_gate(view)
        chunks: list[Chunk] = []
        ignored: list[Rejection] = []
        tokens = longest = 0
        for request in view.waiting:
            if gate is not None and not gate.allows(len(chunks) + len(ignored), len(chunks)):
                break
            length = request.length
            blocks = pool.blocks_for(length)
            if length > max_length or pool.total - blocks < watermark_blocks:
                reason = self._ignore_reason(length, max_length, blocks, pool.total - watermark_blocks)
                ignored.append(Rejection(request, reason))
                continue
            tokens, longest = tokens + length, max(longest, length)
            padded = (len(chunks) + 1) * longest
            if (
                free - blocks < watermark_blocks
                or (padded if self.padded_prefill else tokens) > token_budget
                or seats < request.seats
            ):
                break
            if self.padded_prefill and self.max_paddings is not None and padded - tokens > self.max_paddings:
                break
            self.check_readmission(view, request)
            free, seats = free - blocks, seats - request.seats
            chunks.append(Chunk(request, length))
        if gate is None:
            return PrefillResult(chunks, ignored)
        prefill = chunks or (ignored and self.ignored_step)
        return PrefillResult(chunks, ignored, gate.state_after_prefill() if prefill else gate.state, gate.wake_at)

    def _ignore_reason(self, length: int, max_length: int, blocks: int, max_blocks: int) -> str:
        if length > max_length:
            return f"{length} tokens in one step, the limit is {max_length} (max_num_batched_tokens, max_model_len)"
        return f"{length} tokens need {blocks} blocks, the limit is {max_blocks}"

    def _append_or_preempt_all(self, view: View, running: Queue, free: int) -> BlockPlan:
        """Allocate the blocks of the next token of all running requests. If some are missing, preempt the last ones."""
        block_plan = BlockPlan(view, free)
        queue = deque(running)
        while queue:
            self.append_or_preempt(block_plan, queue.popleft(), queue)
        return block_plan

    def _decode_plan(self, prompts: PrefillResult, steps: int, **fields: Any) -> Plan:
        hold = Hold(steps, keep_free=1, until=prompts.wake_at)
        return Plan(**{"reject": prompts.ignored, "hold": hold, "state": prompts.state, **fields})

    def _swap_in(self, view: View, prompts: PrefillResult, free: int, running: Queue) -> Plan:
        """Decode and swap in. Swapped-in requests come last in the batch."""
        tokens = sum([request.sequences for request in running]) if view.has_groups else len(running)
        swaps = self.choose_swap_ins(
            view, free, self.max_num_seqs - seats_of(view, running), self.token_budget(view) - tokens
        )
        swapped_in, infeasible = swaps.swapped_in, swaps.infeasible
        reject = [*prompts.ignored, *infeasible]
        if swapped_in and self.sort_running:
            chunks = [Chunk(r, r.sequences) for r in (*running, *swapped_in)]
            return self._decode_plan(prompts, 0, swap_in=swapped_in, reject=reject, chunks=chunks)
        steps = 0 if swapped_in or reject else FOREVER
        decode = bool(running or swapped_in)
        return self._decode_plan(prompts, steps, swap_in=swapped_in, reject=reject, decode=decode)

    def _decode_by_priority(self, view: View, prompts: PrefillResult) -> Plan:
        """Sort both queues and preempt for the head of waiting, then decode as usual."""
        queues = self._preempt_by_priority(view, {rejection.request for rejection in prompts.ignored})
        if queues.victims or view.has_groups or view.pool.free <= view.decode_block_need:
            free = view.pool.free + sum(request.blocks for request in queues.victims)
            block_plan = self._append_or_preempt_all(view, queues.running, free)
        else:
            block_plan = BlockPlan(view, view.pool.free - view.decode_block_need)
        preempt = block_plan.preempt
        preempted = {preemption.request for preemption in preempt}
        running = [request for request in queues.running if request not in preempted]
        plan = self._decode_plan(prompts, 0, decode=bool(running))
        if not preempt:
            plan = self._swap_in(view, prompts, block_plan.free, running)
        waiting = [gone.request for gone in preempt[::-1] if gone.queue == "front"] + queues.waiting
        unsorted = [request for request in view.running if request not in preempted and request not in queues.victims]
        sort_running, sort_waiting = running != unsorted, bool(preempt) or waiting != list(view.waiting)
        stays = not (queues.priority_inversion or sort_running or sort_waiting)
        return plan._replace(
            preempt=[*(Preemption(victim) for victim in queues.victims), *preempt],
            reorder=Reorder(
                waiting if sort_waiting else None, [*running, *plan.moves.swap_in] if sort_running else None
            ),
            hold=plan.hold if stays else Hold(0, until=prompts.wake_at),
        )

    def _preempt_by_priority(self, view: View, ignored: set[Request]) -> PriorityPreemption:
        """Sort both queues. Preempt requests that sort after the head of waiting, until it fits."""
        pool, watermark_blocks = view.pool, self.watermark_blocks(view.pool)
        running = sorted(view.running, key=priority_key)
        waiting = [request for request in view.waiting if request not in ignored]
        victims: list[Request] = []
        priority_inversion = False
        if waiting:
            head, free = waiting[0], pool.free
            blocks = pool.blocks_for(head.length)
            head_can_fit = pool.total - blocks >= watermark_blocks and head.length <= self.token_budget(view)
            while running and priority_key(running[-1]) > priority_key(head):
                priority_inversion = True
                if head_can_fit and free - blocks >= watermark_blocks and len(running) < self.max_num_seqs:
                    break
                victims.append(running.pop())
                free += victims[-1].blocks
            waiting = sorted([head, *reversed(victims), *waiting[1:]], key=priority_key)
        rejected = [request for request in view.waiting if request in ignored]
        return PriorityPreemption(running, [*waiting, *rejected], victims, priority_inversion)
