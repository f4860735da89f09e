"""vLLM v0: prefill first. A step runs either prompts or decodes. The last running request is preempted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Optional

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
    Reorder,
    Request,
    View,
    require_effect,
)
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import budget_refusals, priority_key

from .common import Step, VLLMv0, VLLMv0Rules, seats_of

# vLLM's block manager requires one free block during a decode step, even if no request uses it.
DECODE_KEEP_ONE_FREE: Final = Plan(decode=True, hold=Hold(keep_free=1))
DECODE_PAST_FINISH_KEEP_ONE_FREE: Final = Plan(decode=True, hold=Hold(keep_free=1, past_finish=True))


class PrefillStep(Step):
    """A step with whole prompts. Some versions pad them to the longest one."""

    def __init__(self, policy: VLLM, view: View) -> None:
        budget = policy.token_budget(view.max_model_len)
        super().__init__(view, budget, policy.max_num_seqs - seats_of(view, view.running))
        self.budget = budget
        self.most = budget if view.max_model_len is None else min(budget, view.max_model_len)
        self.padded = policy.padded_prefill
        self.max_paddings = FOREVER if policy.max_paddings is None else policy.max_paddings
        self.longest = 0  # of the admitted prompts

    def why_ignored(self, length: int) -> str:
        if length <= self.most:
            return ""
        return f"{length} tokens in one step, the limit is {self.most} (max_num_batched_tokens, max_model_len)"

    def first_tokens(self, length: int) -> int:
        if not self.padded:
            return length if length <= self.tokens else 0
        padded = (len(self.admitted) + 1) * max(self.longest, length)
        padding = padded - length - (self.budget - self.tokens)
        return length if padded <= self.budget and padding <= self.max_paddings else 0

    def admit(self, request: Request, tokens: int, blocks: int) -> None:
        super().admit(request, tokens, blocks)
        self.longest = max(self.longest, tokens)


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
        return budget_refusals(self.token_budget(max_model_len), self.max_num_seqs, True, max_model_len)

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
        step = PrefillStep(self, view)
        if not view.swapped and (view.waiting or self.delay_factor > 0):
            self.admit(step, view.waiting)
            if self.is_prefill(step):
                return Plan(chunks=step.admitted, reject=step.ignored, state=step.state)
        if self.policy == "priority":
            return self._decode_by_priority(step)
        # free == 0 is enough if the last request takes the last block: then every request still finds a free block.
        if view.decoding and (
            view.has_groups or (free <= 0 and not (free == 0 and view.running[-1].cached % pool.block_size == 0))
        ):
            self._append_or_preempt_all(step, view.running)
            if step.preempt:
                return self._decode_plan(step, 0, decode=len(step.preempt) < len(view.running))
        step.free = free
        if view.swapped:
            return self._swap_in_and_decode(step, view.running)
        if fcfs_without_delay and not step.ignored:
            return DECODE_KEEP_ONE_FREE if view.decoding else IDLE_PLAN
        return self._decode_plan(step, 0 if step.ignored else FOREVER, decode=view.decoding > 0)

    def token_budget(self, max_model_len: Optional[int]) -> int:
        """Return the maximum number of tokens per step."""
        return self.max_num_batched_tokens or max(max_model_len or 0, 2048)

    def is_prefill(self, step: Step) -> bool:
        return len(step.admitted) > 0 or (self.ignored_step and len(step.ignored) > 0)

    def _append_or_preempt_all(self, step: Step, running: Queue) -> None:
        """Allocate the blocks of the next token of all running requests. If some are missing, preempt the last ones."""
        queue = deque(running)
        while queue:
            self.append_or_preempt(step, queue.popleft(), queue)

    def _decode_plan(self, step: Step, steps: int, decode: bool, chunks: Sequence[Chunk] = ()) -> Plan:
        return Plan(
            preempt=step.preempt, swap_in=step.swap_in, reject=[*step.ignored, *step.infeasible], chunks=chunks,
            decode=decode, hold=Hold(steps, keep_free=1, until=step.wake_at), state=step.state,
        )  # fmt: skip

    def _swap_in_and_decode(self, step: Step, running: Queue) -> Plan:
        """Decode and swap in. Swapped-in requests come last in the batch."""
        view = step.view
        step.seats = self.max_num_seqs - seats_of(view, running)
        step.tokens -= sum([request.sequences for request in running]) if view.has_groups else len(running)
        self.swap_in(step)
        if step.swap_in and self.sort_running:
            chunks = [Chunk(r, r.sequences) for r in (*running, *step.swap_in)]
            return self._decode_plan(step, 0, False, chunks)
        steps = 0 if step.swap_in or step.ignored or step.infeasible else FOREVER
        return self._decode_plan(step, steps, decode=bool(running or step.swap_in))

    def _decode_by_priority(self, step: PrefillStep) -> Plan:
        """Sort both queues and preempt for the head of waiting, then decode as usual."""
        view, preempt = step.view, step.preempt
        queues = self._preempt_by_priority(step)
        if queues.victims or view.has_groups or view.pool.free <= view.decode_block_need:
            step.free += sum(request.blocks for request in queues.victims)
            self._append_or_preempt_all(step, queues.running)
        else:
            step.free -= view.decode_block_need
        preempted = {preemption.request for preemption in preempt}
        running = [request for request in queues.running if request not in preempted]
        if preempt:
            plan = self._decode_plan(step, 0, decode=bool(running))
        else:
            plan = self._swap_in_and_decode(step, running)
        waiting = [gone.request for gone in preempt[::-1] if gone.queue == "front"] + queues.waiting
        unsorted = [request for request in view.running if request not in preempted and request not in queues.victims]
        sort_running, sort_waiting = running != unsorted, bool(preempt) or waiting != list(view.waiting)
        stays = not (queues.priority_inversion or sort_running or sort_waiting)
        return plan._replace(
            preempt=[*(Preemption(victim) for victim in queues.victims), *preempt],
            reorder=Reorder(
                waiting if sort_waiting else None, [*running, *plan.moves.swap_in] if sort_running else None
            ),
            hold=plan.hold if stays else Hold(0, until=step.wake_at),
        )

    def _preempt_by_priority(self, step: PrefillStep) -> PriorityPreemption:
        """Sort both queues. Preempt requests that sort after the head of waiting, until it fits."""
        view, pool, watermark_blocks = step.view, step.view.pool, self.watermark_blocks(step.view.pool)
        ignored = {rejection.request for rejection in step.ignored}
        running = sorted(view.running, key=priority_key)
        waiting = [request for request in view.waiting if request not in ignored]
        victims: list[Request] = []
        priority_inversion = False
        if waiting:
            head, free = waiting[0], pool.free
            blocks = pool.blocks_for(head.length)
            head_can_fit = pool.total - blocks >= watermark_blocks and head.length <= step.budget
            while running and priority_key(running[-1]) > priority_key(head):
                priority_inversion = True
                if head_can_fit and free - blocks >= watermark_blocks and len(running) < self.max_num_seqs:
                    break
                victims.append(running.pop())
                free += victims[-1].blocks
            waiting = sorted([head, *reversed(victims), *waiting[1:]], key=priority_key)
        rejected = [request for request in view.waiting if request in ignored]
        return PriorityPreemption(running, [*waiting, *rejected], victims, priority_inversion)
