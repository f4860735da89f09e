"""vLLM v0 with chunked prefill: a token budget per step, used by running requests first, then by new prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

from servesim.core import (
    FOREVER,
    IDLE_PLAN,
    Chunk,
    Hold,
    Int0,
    Int1,
    Plan,
    Reorder,
    Request,
    View,
    require_effect,
)
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import budget_refusals, prefilling_is_last

from .common import Step, VLLMv0, VLLMv0Rules
from .policy import DECODE_PAST_FINISH_KEEP_ONE_FREE


class ChunkedStep(Step):
    """A step with the running requests that it continues."""

    def __init__(self, policy: VLLMChunked, view: View) -> None:
        super().__init__(view, policy.max_num_batched_tokens, policy.max_num_seqs)
        self.partial = PartialPrefills(policy, view) if policy.max_num_partial_prefills > 1 else None
        self.max_chunk = self.tokens if self.partial is None else self.partial.max_chunk  # of one prompt
        self.continued: list[Chunk] = []  # of partly computed prompts
        self.unscheduled: list[Request] = []  # the token budget was used up
        self.decodes: Optional[list[Request]] = None  # None: all decoding requests

    def skips(self, length: int) -> bool:
        return self.partial is not None and not self.partial.allows(length)

    def why_ignored(self, length: int) -> str:
        most = self.view.max_model_len
        if most is None or self.first_tokens(length) <= most:
            return ""
        return f"prompt of {length} tokens, max_model_len is {most}"

    def first_tokens(self, length: int) -> int:
        return min(length, self.tokens, self.max_chunk)

    def admit(self, request: Request, tokens: int, blocks: int) -> None:
        super().admit(request, tokens, blocks)
        if self.partial is not None:
            self.partial.record_admission(request.length)


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
        step = ChunkedStep(self, view)
        self._schedule_running(step)
        if view.swapped and not step.preempt:
            self.swap_in(step)
        # The first chunk of a prompt allocates the blocks of all of it.
        self.admit(step, view.waiting if step.tokens or self.examine_at_full_budget else ())
        return self._make_plan(step)

    def _schedule_running(self, step: ChunkedStep) -> None:
        """Continue decodes and partly computed prompts in order, until the token budget is used up."""
        view = step.view
        decoding, need = view.decoding, view.decode_block_need
        if (
            decoding > step.tokens
            or view.has_groups
            or view.pool.free <= need
            or not prefilling_is_last(view.running, view.prefilling)
        ):
            self._schedule_one_by_one(step)
            return
        step.tokens -= decoding
        for request in view.prefilling:
            size = min(request.pending, step.tokens, step.max_chunk)
            if size and not step.unscheduled:
                step.continued.append(Chunk(request, size))
                step.tokens -= size
            else:
                step.unscheduled.append(request)
        step.seats -= decoding + len(step.continued)
        step.free -= need

    def _schedule_one_by_one(self, step: ChunkedStep) -> None:
        decodes: list[Request] = []
        queue = deque(step.view.running)
        while queue and step.tokens > 0:
            request = queue.popleft()
            # The tokens of several sequences are never divided, also if they exceed the budget.
            several = request.sequences > 1
            size = request.sequences if several else min(request.pending, step.tokens, step.max_chunk)
            if not self.append_or_preempt(step, request, queue):
                break
            step.tokens -= size
            step.seats -= request.seats
            if request.decodes:
                decodes.append(request)
            else:
                step.continued.append(Chunk(request, size))
        step.unscheduled, step.decodes = list(queue), decodes

    def _make_plan(self, step: ChunkedStep) -> Plan:
        """Order the batch: new, running and swapped-in prompts, then running and swapped-in decodes."""
        view, swapped_in = step.view, step.swap_in
        chunks = [*step.admitted, *step.continued]
        chunks += [Chunk(request, request.pending) for request in swapped_in if not request.prompt_done]
        failed = step.infeasible
        if not self.answer_failed_swaps:
            failed = [rejection._replace(outcome="unanswered") for rejection in failed]
        reject = [*step.ignored, *failed]
        moved = step.preempt or swapped_in or step.unscheduled or step.decodes is not None
        if not moved and self._stays_sorted(view, step.admitted):
            hold = Hold(0 if chunks or reject else FOREVER, keep_free=1, until=step.wake_at)
            return Plan(reject=reject, chunks=chunks, decode=view.decoding > 0, hold=hold, state=step.state)
        decodes = [r for r in view.running if r.decodes] if step.decodes is None else step.decodes
        batch = [*chunks, *(Chunk(r, r.sequences) for r in (*decodes, *(r for r in swapped_in if r.prompt_done)))]
        return Plan(
            preempt=step.preempt,
            swap_in=swapped_in,
            reject=reject,
            chunks=batch,
            reorder=Reorder(running=self._running_order(step, decodes)),
            hold=Hold(0, until=step.wake_at),
            state=step.state,
        )

    def _stays_sorted(self, view: View, admitted: Sequence[Chunk]) -> bool:
        """Return whether the running queue needs no sorting after the new prompts are added at its end."""
        if self.max_num_partial_prefills > 1 and view.prefilling:
            return False
        if not (self.sort_running and admitted):
            return True
        arrivals = [chunk.request.arrival for chunk in admitted]
        return (not view.running or view.running[-1].arrival < arrivals[0]) and arrivals == sorted(arrivals)

    def _running_order(self, step: ChunkedStep, decodes: Sequence[Request]) -> list[Request]:
        """Return the running queue after the step. Prompts that are complete then come before the others."""
        swapped_in = sorted(step.swap_in, key=lambda request: not request.prompt_done)
        admitted = [chunk.request for chunk in step.admitted]
        complete = [chunk.request for chunk in step.continued if chunk.tokens == chunk.request.pending]
        others = [chunk.request for chunk in step.continued if chunk.tokens < chunk.request.pending]
        if not self.sort_running:
            return [*step.unscheduled, *swapped_in, *decodes, *complete, *others, *admitted]
        prompts = [chunk.request for chunk in step.continued]
        requests = [*step.unscheduled, *admitted, *decodes, *prompts, *swapped_in]
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
