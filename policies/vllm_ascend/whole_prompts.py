"""Whole prompts before decodes: AscendScheduler of vllm-ascend, and EnhancedScheduler of vllm-mindspore.

A step has prompts or decodes. A prompt that does not fit now is skipped, and later ones may go before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Optional

from servesim.core import (
    DECODE_PAST_FINISH,
    DECODE_UNTIL_FINISH,
    FOREVER,
    IDLE_PLAN,
    NOT_CACHED,
    Chunk,
    Int0,
    Int1,
    Plan,
    Preemption,
    Rejection,
    Reorder,
    Request,
    View,
    require_effect,
)
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import priority_key
from servesim.policies.vllm_v1.rules import VLLMRules
from servesim.policies.vllm_v1.step_pass import DECODE_ONCE, Pass

from .rules import AFTER_STEP, AscendRules, MindSporeRules
from .v1 import AscendV1, with_state

WATERMARK: Final = 0.01  # fraction of the blocks that an admission of vllm-ascend leaves free; no setting
LONG_PROMPT: Final = 0.04  # of max_model_len, if only max_long_partial_prefills is set


class Prefills(NamedTuple):
    """The prompts that a step computes, and what it does with the others."""

    chunks: Sequence[Chunk]
    ignored: Sequence[Rejection]
    skipped: Sequence[Request]
    may_grow: bool  # a prompt that must wait may soon find more cached blocks


class DecodePass(Pass):
    """A step of decodes, which admits no request."""

    def admit(self, chunks: list[Chunk]) -> bool:
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class PrefillFirst(AscendV1):
    """The fields and the prefill pass that both schedulers share."""

    version: str = "0.11.0"  # version of vLLM under the plug-in
    enable_chunked_prefill: bool = False  # true: the scheduler of vLLM itself
    scheduler_reserve_full_isl: bool = False  # admit only if the blocks of the whole prompt are free (from 0.19)

    def _require_version(self) -> None:
        if self.enable_chunked_prefill:
            super()._require_version()

    def is_full(self, free: int, total: int) -> bool:
        """Whether an admission that leaves this number of blocks free must wait, and others may go before it."""
        return False

    def long_prompts(self, max_model_len: Optional[int]) -> tuple[int, int]:
        """Return the largest prompt that is not long, and how many long ones a step admits."""
        return FOREVER, FOREVER

    def ignore(self, request: Request, largest: int) -> Rejection:
        """Return the rejection of a prompt that can never run."""
        return Rejection(request, f"ignored: {request.length} tokens, at most {largest} can run")

    def prefill(self, view: View, seats: int) -> Prefills:
        """Choose the waiting requests that run now, from the head. A prompt is never cut."""
        pool, cache, free, tokens = view.pool, view.prefix_cache, view.pool.free, self.max_num_batched_tokens
        model_len = FOREVER if view.max_model_len is None else view.max_model_len
        largest = min(model_len, tokens, (pool.total + 1) * pool.block_size)  # the null block is counted
        threshold, long_prompts = self.long_prompts(view.max_model_len)
        chunks: list[Chunk] = []
        ignored: list[Rejection] = []
        skipped: list[Request] = []
        prefix, may_grow = NOT_CACHED, False
        if cache is not None:
            cache.start(decodes=False)
        for request in view.waiting:
            if tokens <= 0 or len(chunks) >= seats:
                break
            cached = request.cached
            if cache is not None:
                prefix = cache.find(request, free)
                cached, may_grow = prefix.tokens, may_grow or prefix.may_grow
            size = request.length - cached
            need = pool.blocks_for(request.length) - prefix.tokens // pool.block_size + prefix.idle_blocks
            if size > largest:
                ignored.append(self.ignore(request, largest))
            elif size > tokens or self.is_full(free - need, pool.total) or (size > threshold and not long_prompts):
                skipped.append(request)
            elif need > free:
                break
            else:
                long_prompts -= size > threshold
                free -= need
                tokens -= size
                chunks.append(Chunk(request, size, cached=cached))
                if cache is not None:
                    cache.admit(request, prefix, size)
        return Prefills(chunks, ignored, skipped, may_grow)

    def make_pass(self, view: View, tokens: int, free: int) -> Pass:
        return Pass(self, view, tokens, free) if self.enable_chunked_prefill else DecodePass(self, view, tokens, free)

    def decode(self, view: View, may_grow: bool) -> Plan:
        """Return a step of decodes."""
        if view.decoding > self.max_num_batched_tokens or view.decode_block_need > view.pool.free:
            return self.decode_one_by_one(view, view.running)
        if not view.decoding:
            return IDLE_PLAN
        return DECODE_PAST_FINISH if not view.waiting else DECODE_ONCE if may_grow else DECODE_UNTIL_FINISH

    def decode_one_by_one(self, view: View, order: Iterable[Request]) -> Plan:
        """Return a step in which some requests do not run, or are preempted."""
        return self.schedule_in_order(view, order, self.max_num_batched_tokens)


def with_ignored(plan: Plan, ignored: Sequence[Rejection]) -> Plan:
    """Return a plan that also removes prompts that can never run."""
    return plan._replace(reject=ignored, hold=0) if ignored else plan


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLMAscend(PrefillFirst):
    """AscendScheduler of vllm-ascend up to 0.11: whole prompts before decodes, small ones may go before large ones."""

    max_long_partial_prefills: Optional[Int1] = None  # most prompts above the threshold that enter in one step
    enable_pd_transfer: bool = False  # first phase: prompts only; when none waits, decodes begin, for good
    decode_max_num_seqs: Int0 = 0  # maximum running requests after the first phase, if above max_num_seqs

    def __post_init__(self) -> None:
        super().__post_init__()
        require_effect(self, self.enable_pd_transfer, "enable_pd_transfer", "decode_max_num_seqs")
        names = ("max_long_partial_prefills", "enable_pd_transfer")
        require_effect(
            self, self.version == "0.11.0" and not self.enable_chunked_prefill, "whole prompts in 0.11.0", *names
        )
        if self.policy != "fcfs":
            raise ValueError(f"policy: expected fcfs, vllm-ascend does not start otherwise, got {self.policy!r}")
        if self.version not in ("0.9.1", "0.11.0"):
            raise ValueError(f"version: expected 0.9.1 or 0.11.0, got {self.version!r}")

    def rules(self) -> VLLMRules:
        rules = AscendRules(self, f"AscendScheduler of vllm-ascend {self.version}")
        rules.recomputes_last = self.enable_chunked_prefill  # otherwise a running request is never a prompt
        return rules

    def is_full(self, free: int, total: int) -> bool:
        return free < WATERMARK * (total + 1)

    def ignore(self, request: Request, largest: int) -> Rejection:
        return super().ignore(request, largest)._replace(outcome="unanswered")

    def long_prompts(self, max_model_len: Optional[int]) -> tuple[int, int]:
        if self.max_long_partial_prefills is None:  # then vllm-ascend also drops the threshold
            return FOREVER, FOREVER
        shortest = FOREVER if max_model_len is None else max(1, int(LONG_PROMPT * max_model_len))
        return self.long_prefill_token_threshold or shortest, self.max_long_partial_prefills

    def decide(self, view: View) -> Plan:
        if self.enable_chunked_prefill:
            return self.schedule(view, self.max_num_batched_tokens)
        if self.enable_pd_transfer:
            return self._decide_in_phases(view)
        if not view.waiting:
            return self.decode(view, may_grow=False)
        chunks, ignored, _, may_grow = self.prefill(view, self.max_num_seqs - len(view.running))
        return with_ignored(Plan(chunks=chunks) if chunks else self.decode(view, may_grow), ignored)

    def _decide_in_phases(self, view: View) -> Plan:
        """Decide with enable_pd_transfer. The state is the number of requests that wait for the second phase.

        They hold their blocks and are the last of the running queue. None: the first phase, in which all of them wait.
        """
        parked: Optional[int] = view.state
        if not view.waiting and not view.running:
            return with_state(IDLE_PLAN, parked)
        if parked is None and view.waiting:
            chunks, ignored, _, _ = self.prefill(view, self.max_num_seqs)
            return with_ignored(Plan(chunks=chunks), ignored)
        running = list(view.running)
        active = len(running) - parked if parked is not None else 0
        seats = max(self.max_num_seqs, self.decode_max_num_seqs) - active
        chunks, ignored, _, may_grow = self.prefill(view, seats)
        left = max(0, len(running) - active - (seats - len(chunks)))  # that still wait
        if chunks:
            new = [chunk.request for chunk in chunks]
            order = [*running[:active], *new, *running[active:]] if active < len(running) else None
            plan = Plan(chunks=chunks, reorder=Reorder(running=order), state=left)
        elif left:
            plan = with_state(self.decode_one_by_one(view, running[: len(running) - left]), left)
        else:
            plan = with_state(self.decode(view, may_grow), left)
        return with_ignored(plan, ignored)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLMMindSpore(PrefillFirst):
    """EnhancedScheduler of vllm-mindspore 0.5, chunked prefill off: whole prompts before decodes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version != "0.11.0":
            raise ValueError(f"version: expected 0.11.0, the vLLM under vllm-mindspore 0.5, got {self.version!r}")
        if self.policy == "priority" and self.enable_prefix_caching:
            raise ValueError("policy: expected fcfs with enable_prefix_caching, priorities are not modelled with it")

    def rules(self) -> VLLMRules:
        is_defective = self.policy == "priority" and not self.enable_chunked_prefill
        kind = MindSporeRules if is_defective else AscendRules
        rules = kind(self, "EnhancedScheduler of vllm-mindspore 0.5.1")
        rules.recomputes_last = self.enable_chunked_prefill
        return rules

    def decide(self, view: View) -> Plan:
        """Decide a step. The state has the requests that were preempted after they were scheduled in the same step.

        vllm-mindspore takes them for scheduled prompts: it runs no decode until they are admitted again.
        """
        if self.enable_chunked_prefill:
            return self.schedule(view, self.max_num_batched_tokens)
        forgotten: Optional[tuple[Request, ...]] = view.state
        if not view.waiting:
            return self.decode(view, may_grow=False) if forgotten is None else with_state(IDLE_PLAN, forgotten)
        chunks, ignored, skipped, may_grow = self.prefill(view, self.max_num_seqs - len(view.running))
        if chunks:
            admitted = {chunk.request for chunk in chunks}
            left = tuple([request for request in forgotten or () if request not in admitted])
            plan = Plan(chunks=chunks, state=left or None)
            if len(skipped) > 1 and not self.is_sorted:  # they come back in reverse order
                others = set(skipped)
                order = [*reversed(skipped), *(request for request in view.waiting if request not in others)]
                plan = plan._replace(reorder=Reorder(waiting=order))
        else:
            plan = self.decode(view, may_grow) if forgotten is None else with_state(IDLE_PLAN, forgotten)
        return with_ignored(plan, ignored)

    def decode_one_by_one(self, view: View, order: Iterable[Request]) -> Plan:
        if self.policy == "fcfs":
            return super().decode_one_by_one(view, order)
        pool, free, running = view.pool, view.pool.free, list(order)
        scheduled: list[Request] = []
        preempt: list[Preemption] = []
        index = 0
        while index < len(running) and len(scheduled) < self.max_num_batched_tokens:
            request = running[index]
            need = pool.blocks_for(request.length) - request.blocks
            while need > free and request in running:
                victim = max(running, key=priority_key)
                running.remove(victim)  # the index stays, so the request that moves to it may be passed over
                preempt.append(Preemption(victim, extra=AFTER_STEP if victim in scheduled else None))
                free += pool.blocks_for(victim.length) if victim in scheduled else victim.blocks
            if request not in running:
                break
            scheduled.append(request)
            free -= need
            index += 1
        forgotten = tuple([gone.request for gone in preempt if gone.extra == AFTER_STEP])
        return Plan(preempt=preempt, chunks=[Chunk(request, 1) for request in scheduled], state=forgotten or None)
