"""vLLM v0 with chunked prefill: a token budget per step, used by running requests first, then by new prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Optional

from servesim.core import (
    FOREVER,
    IDLE_PLAN,
    Chunk,
    Hold,
    Int0,
    Int1,
    Plan,
    Rejection,
    Reorder,
    Request,
    View,
    require_effect,
)
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import budget_refusals, prefilling_is_last

from .common import BlockPlan, SwapInResult, VLLMv0, VLLMv0Rules
from .policy import DECODE_PAST_FINISH_KEEP_ONE_FREE, PrefillResult


class RunningResult(NamedTuple):
    """The running requests that a step continues."""

    chunks: list[Chunk]  # of partly computed prompts
    unscheduled: Sequence[Request]  # the token budget was used up
    decodes: Optional[Sequence[Request]]  # None: all decoding requests
    seats: int  # sequences of the decodes and chunks
    tokens: int  # tokens left in the budget
    block_plan: BlockPlan


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLMChunked(VLLMv0):
    """The scheduler of vLLM v0 with enable_chunked_prefill. The defaults are those of 0.8.5; see the presets.

    From 0.5.4 on (`delay_scope: request-unless-idle`), the delay factor has no effect, as in the real engine.
    """

    # queue: 0.4.1-0.5.3; request-unless-idle: from 0.5.4
    delay_scope: Literal["queue", "request-unless-idle"] = "request-unless-idle"
    max_num_batched_tokens: Int1 = 2048  # tokens per step (768 in 0.4.1, 512 in 0.4.2-0.6.0)
    max_num_partial_prefills: Int1 = 1  # prompts that share the token budget equally (>= 0.7)
    max_long_partial_prefills: Int1 = 1  # maximum long prompts among them
    long_prefill_token_threshold: Int0 = 0  # tokens above which a prompt is long; 0: 4 % of max_model_len
    examine_at_full_budget: bool = False  # ignore prompts that never fit also if no token is left (<= 0.5.0)
    answer_failed_swaps: bool = True  # reply to a swapped request larger than the pool; false: no reply (0.4.2)

    def __post_init__(self) -> None:
        super().__post_init__()
        several = self.max_num_partial_prefills > 1
        fields = ("max_long_partial_prefills", "long_prefill_token_threshold")
        require_effect(self, several, "max_num_partial_prefills above 1", *fields)
        if self.max_num_partial_prefills > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_partial_prefills: expected at most {self.max_num_batched_tokens} (max_num_batched_tokens), "
                f"got {self.max_num_partial_prefills!r}"
            )

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        refusals = budget_refusals(self.max_num_batched_tokens, self.max_num_seqs, False, max_model_len)
        partial, long, threshold = (
            self.max_num_partial_prefills, self.max_long_partial_prefills, self.long_prefill_token_threshold,
        )  # fmt: skip
        if long > partial:
            refusals.append(f"max_long_partial_prefills ({long}) is above max_num_partial_prefills ({partial})")
        if partial > 1 and max_model_len is not None and threshold > max_model_len:
            refusals.append(f"long_prefill_token_threshold ({threshold}) is above max_model_len ({max_model_len})")
        return refusals

    def rules(self) -> VLLMv0Rules:
        return VLLMv0Rules(
            "vLLM v0, 0.4.1 to 0.9.2, with enable_chunked_prefill",
            "recordings of the real schedulers of 0.4.2, 0.6.1 and 0.8.5; not validated: several partial prefills, "
            "0.5.0",
            self.has_sequence_groups,
        )

    @property
    def delays(self) -> bool:
        # From 0.5.4 on, vLLM tests the delay while its running queue is empty, so there is no delay.
        return self.delay_factor > 0 and self.delay_scope == "queue"

    def decide(self, view: View) -> Plan:
        if not (view.waiting or view.swapped or view.prefilling or self.delays or view.has_groups):
            if view.pool.free > view.decode_block_need and view.decoding <= self.max_num_batched_tokens:
                return DECODE_PAST_FINISH_KEEP_ONE_FREE if view.decoding else IDLE_PLAN
        elif not (view.waiting or view.running or view.swapped):
            return Plan(state=view.state)
        partial = PartialPrefills(self, view) if self.max_num_partial_prefills > 1 else None
        running = self._schedule_running(view, self.max_num_batched_tokens if partial is None else partial.max_chunk)
        block_plan = running.block_plan
        swaps = SwapInResult(block_plan.free, self.max_num_seqs - running.seats, running.tokens)
        if view.swapped and not block_plan.preempt:
            swaps = self.choose_swap_ins(view, swaps.free, swaps.seats, swaps.tokens)
        prompts = self._schedule_prefills(view, swaps.free, swaps.seats, swaps.tokens, partial)
        return self._make_plan(view, running, swaps, prompts)

    def _schedule_running(self, view: View, max_chunk: int) -> RunningResult:
        """Continue decodes and partly computed prompts in order, until the token budget is used up."""
        decoding, need = view.decoding, view.decode_block_need
        tokens = self.max_num_batched_tokens - decoding
        if (
            tokens < 0
            or view.has_groups
            or view.pool.free <= need
            or not prefilling_is_last(view.running, view.prefilling)
        ):
            return self._schedule_one_by_one(view, max_chunk)
        chunks: list[Chunk] = []
        unscheduled: list[Request] = []
        for request in view.prefilling:
            size = min(request.pending, tokens, max_chunk)
            if size and not unscheduled:
                chunks.append(Chunk(request, size))
                tokens -= size
            else:
                unscheduled.append(request)
        block_plan = BlockPlan(view, view.pool.free - need)
        return RunningResult(chunks, unscheduled, None, decoding + len(chunks), tokens, block_plan)

    def _schedule_one_by_one(self, view: View, max_chunk: int) -> RunningResult:
        block_plan, tokens, seats = BlockPlan(view), self.max_num_batched_tokens, 0
        chunks: list[Chunk] = []
        decodes: list[Request] = []
        queue = deque(view.running)
        while queue and tokens > 0:
            request = queue.popleft()
            # The tokens of several sequences are never divided, also if they exceed the budget.
            size = request.sequences if request.sequences > 1 else min(request.pending, tokens, max_chunk)
            if not self.append_or_preempt(block_plan, request, queue):
                break
            tokens -= size
            seats += request.seats
            if request.decodes:
                decodes.append(request)
            else:
                chunks.append(Chunk(request, size))
        return RunningResult(chunks, list(queue), decodes, seats, tokens, block_plan)

    def _schedule_prefills(
        self, view: View, free: int, seats: int, tokens: int, partial: Optional[PartialPrefills]
    ) -> PrefillResult:
        """Admit from the head of waiting. The first chunk allocates the blocks of the whole prompt."""
        pool, watermark_blocks = view.pool, self.watermark_blocks(view.pool)
        gate = self.delay_gate(view)
        chunks: list[Chunk] = []
        ignored: list[Rejection] = []
        for request in view.waiting if tokens or self.examine_at_full_budget else ():
            if gate is not None and not gate.allows(len(chunks) + len(ignored), len(chunks)):
                break
            length = request.length
            if partial is not None and not partial.allows(length):
                continue
            size = min(length, tokens) if partial is None else min(length, tokens, partial.max_chunk)
            blocks = pool.blocks_for(length)
            if view.max_model_len is not None and size > view.max_model_len:
                ignored.append(Rejection(request, f"prompt of {length} tokens, max_model_len is {view.max_model_len}"))
                continue
            if pool.total - blocks < watermark_blocks:
                max_blocks = pool.total - watermark_blocks
                ignored.append(Rejection(request, f"{length} tokens need {blocks} blocks, the limit is {max_blocks}"))
                continue
            if free - blocks < watermark_blocks or not size or seats < request.seats:
                break
            self.check_readmission(view, request)
            free, seats, tokens = free - blocks, seats - request.seats, tokens - size
            chunks.append(Chunk(request, size, blocks))
            if partial is not None:
                partial.record_admission(length)
        if gate is None:
            return PrefillResult(chunks, ignored)
        return PrefillResult(chunks, ignored, gate.state_after_prefill() if chunks else gate.state, gate.wake_at)

    def _make_plan(self, view: View, running: RunningResult, swaps: SwapInResult, prompts: PrefillResult) -> Plan:
        """Order the batch: new, running and swapped-in prompts, then running and swapped-in decodes."""
        preempt, swapped_in = running.block_plan.preempt, swaps.swapped_in
        chunks = [*prompts.chunks, *running.chunks]
        if swapped_in:
            chunks = [*chunks, *(Chunk(request, request.pending) for request in swapped_in if not request.prompt_done)]
        failed = swaps.infeasible
        if not self.answer_failed_swaps:
            failed = [rejection._replace(outcome="unanswered") for rejection in failed]
        reject = [*prompts.ignored, *failed]
        if not (preempt or swapped_in or running.unscheduled or running.decodes is not None) and self._stays_sorted(
            view, prompts.chunks
        ):
            hold = Hold(0 if chunks or reject else FOREVER, keep_free=1, until=prompts.wake_at)
            return Plan(reject=reject, chunks=chunks, decode=view.decoding > 0, hold=hold, state=prompts.state)
        decodes = [r for r in view.running if r.decodes] if running.decodes is None else running.decodes
        order = self._running_order(running, decodes, swapped_in, [chunk.request for chunk in prompts.chunks])
        batch = [*chunks, *(Chunk(r, r.sequences) for r in (*decodes, *(r for r in swapped_in if r.prompt_done)))]
        return Plan(
            preempt=preempt,
            swap_in=swapped_in,
            reject=reject,
            chunks=batch,
            reorder=Reorder(running=order),
            hold=Hold(0, until=prompts.wake_at),
            state=prompts.state,
        )

    def _stays_sorted(self, view: View, admitted: Sequence[Chunk]) -> bool:
        """Return whether the running queue needs no sorting after the new prompts are added at its end."""
        if self.max_num_partial_prefills > 1 and view.prefilling:
            return False
        if not (self.sort_running and admitted):
            return True
        arrivals = [chunk.request.arrival for chunk in admitted]
        return (not view.running or view.running[-1].arrival < arrivals[0]) and arrivals == sorted(arrivals)

    def _running_order(
        self,
        running: RunningResult,
        decodes: Sequence[Request],
        swapped_in: Sequence[Request],
        admitted: Sequence[Request],
    ) -> list[Request]:
        """Return the running queue after the step. Prompts that are complete then come before the others."""
        swapped_in = sorted(swapped_in, key=lambda request: not request.prompt_done)
        complete = [chunk.request for chunk in running.chunks if chunk.tokens == chunk.request.pending]
        others = [chunk.request for chunk in running.chunks if chunk.tokens < chunk.request.pending]
        if not self.sort_running:
            return [*running.unscheduled, *swapped_in, *decodes, *complete, *others, *admitted]
        prompts = [chunk.request for chunk in running.chunks]
        requests = [*running.unscheduled, *admitted, *decodes, *prompts, *swapped_in]
        return sorted(requests, key=lambda request: request.arrival)


class PartialPrefills:
    """Several partial prefills in one step: each gets an equal share of the budget; few of them may be long."""

    def __init__(self, policy: VLLMChunked, view: View) -> None:
        max_prompts, self.max_long = policy.max_num_partial_prefills, policy.max_long_partial_prefills
        self.threshold = policy.long_prefill_token_threshold or int(0.04 * (view.max_model_len or 0))
        self.long_count = sum(request.pending > self.threshold for request in view.prefilling)
        prompts, long_count = len(view.prefilling), self.long_count
        for request in view.waiting:
            if prompts >= max_prompts:
                break
            if request.length > self.threshold:
                if long_count >= self.max_long:
                    continue
                long_count += 1
            prompts += 1
        self.max_chunk = policy.max_num_batched_tokens // max(1, min(prompts, max_prompts))

    def allows(self, length: int) -> bool:
        """Return whether a prompt of this length may be admitted."""
        return length <= self.threshold or self.long_count < self.max_long

    def record_admission(self, length: int) -> None:
        """Count an admitted prompt if it is long."""
        self.long_count += length > self.threshold
