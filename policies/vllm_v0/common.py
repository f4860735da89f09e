"""Code of both vLLM v0 schedulers, policy.py and chunked.py: rules, and the passes over the queues in one step.

`length` is the prompt plus the generated tokens. The newest token is not cached, so a decode needs blocks for `length`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Optional

from servesim.core import (
    BlockPool,
    Chunk,
    Float0,
    Fraction,
    Int1,
    Policy,
    Preemption,
    Queue,
    Rejection,
    Request,
    Stuck,
    View,
)
from servesim.core.native import mypyc_attr
from servesim.engine.rules import EngineRules
from servesim.policies.delay_factor import Delay, DelayState
from servesim.policies.vllm_common import requests_in


@mypyc_attr(allow_interpreted_subclasses=True)
class VLLMv0Rules(EngineRules):
    """What both schedulers have beside their decisions."""

    def __init__(self, engine: str, validated_against: str, sequence_groups: bool) -> None:
        super().__init__(engine, validated_against)
        # The scheduler itself rejects ("ignores") a prompt that can never fit when it is at the head of the queue.
        self.rejects_oversized = False
        self.arrival_is_send_time = True
        self.slots_field, self.budget_fields = "max_num_seqs", ("max_num_batched_tokens",)
        self.sequence_groups = sequence_groups
        self.splits_answers = not sequence_groups


class Step:
    """What one step does so far, and what is left of it."""

    def __init__(self, view: View, tokens: int, seats: int) -> None:
        self.view = view
        self.free, self.host_free = view.pool.free, view.pool.host_free  # blocks
        self.tokens = tokens
        self.seats = seats  # sequences
        self.admitted: list[Chunk] = []  # of new prompts
        self.ignored: list[Rejection] = []  # new prompts that can never run
        self.preempt: list[Preemption] = []
        self.swap_in: list[Request] = []
        self.infeasible: list[Rejection] = []  # swapped requests that can never come back
        self.state: Any = view.state  # of the delay factor
        self.wake_at: Optional[float] = None  # time at which a delayed prompt may be admitted

    def skips(self, length: int) -> bool:
        """Whether later prompts may go before one of this length."""
        return False

    def why_ignored(self, length: int) -> str:
        """Return why a prompt of this length is too long; empty: it is not."""
        raise NotImplementedError

    def first_tokens(self, length: int) -> int:
        """Return how many tokens of a prompt would run in this step; 0: it must wait."""
        raise NotImplementedError

    def admit(self, request: Request, tokens: int, blocks: int) -> None:
        """Run tokens of a new prompt, which gets all its blocks."""
        self.free -= blocks
        self.tokens -= tokens
        self.seats -= request.seats
        self.admitted.append(Chunk(request, tokens, blocks))


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLMv0(Policy):
    """The fields and methods that both schedulers of vLLM v0 share: default and chunked prefill. Defaults: 0.8.5."""

    max_num_seqs: Int1 = 256  # maximum running sequences; swapped ones do not count
    watermark: Fraction = 0.01  # fraction of the blocks that an admission or a swap-in must leave free
    delay_factor: Float0 = 0.0  # prompts wait this multiple of the last prefill's latency (scheduler_delay_factor)
    # request: 0.4.0; queue: 0.4.1-0.5.3; request-unless-idle: from 0.5.4
    delay_scope: Literal["queue", "request", "request-unless-idle"] = "request-unless-idle"
    # recompute, or swap (to host blocks); null: swap only several sequences
    preemption_mode: Literal[None, "recompute", "swap"] = None
    sort_running: bool = False  # sort the running queue by arrival (<= 0.5.3)
    # swap-in order: arrival (<= 0.5.3), or swapped (order of the swap-outs)
    swap_order: Literal["arrival", "swapped"] = "swapped"
    # free blocks that an append requires: any_free: 1 (< 0.6.3); touched: those it writes
    append_rule: Literal["any_free", "touched"] = "touched"
    fail_infeasible: bool = True  # reject a swapped request larger than the pool (>= 0.4.1); false: it waits forever
    free_failed_swaps: bool = False  # free the host blocks of such a request; vLLM never frees them

    @property
    def has_sequence_groups(self) -> bool:
        """Whether answers share blocks: block manager 2 dies if a request with several sequences comes back."""
        return self.append_rule == "any_free"

    def max_output(self, prompt: int, pool: BlockPool, max_model_len: Optional[int]) -> int:
        return super().max_output(prompt, pool, max_model_len) + 1

    @property
    def delays(self) -> bool:
        """Whether prompts may wait for a multiple of the last prefill's latency."""
        return self.delay_factor > 0

    def initial_state(self) -> Any:
        return DelayState() if self.delays else None

    def watermark_blocks(self, pool: BlockPool) -> int:
        """Return the number of blocks that an admission or a swap-in must leave free."""
        return int(self.watermark * pool.total)

    def admit(self, step: Step, waiting: Iterable[Request]) -> None:
        """Admit prompts from the head of waiting until tokens, blocks or sequences are used up."""
        view, pool, kept_free = step.view, step.view.pool, self.watermark_blocks(step.view.pool)
        delay = Delay(self.delay_factor, self.delay_scope, view, view.state) if self.delays else None
        for request in waiting:
            admitted = len(step.admitted)
            if delay is not None and not delay.allows(admitted + len(step.ignored), admitted):
                break
            length = request.length
            if step.skips(length):
                continue
            blocks = pool.blocks_for(length)
            reason = step.why_ignored(length)
            if not reason and pool.total - blocks < kept_free:
                reason = f"{length} tokens need {blocks} blocks, the limit is {pool.total - kept_free}"
            if reason:
                step.ignored.append(Rejection(request, reason))
                continue
            tokens = step.first_tokens(length)
            if step.free - blocks < kept_free or not tokens or step.seats < request.seats:
                break
            check_readmission(view, request)
            step.admit(request, tokens, blocks)
        if delay is not None:
            if self.is_prefill(step):
                delay.record_prefill()
            step.state, step.wake_at = delay.state, delay.wake_at

    def is_prefill(self, step: Step) -> bool:
        """Whether the step counts as a prefill, also for the delay factor."""
        return len(step.admitted) > 0

    def append_or_preempt(self, step: Step, request: Request, later: deque[Request]) -> bool:
        """Allocate the blocks of the next token of a request. Return False if the request itself was preempted.

        If blocks are missing, preempt the last request of `later`.
        """
        pool = step.view.pool
        # A partly computed prompt holds the blocks of its length. If these are full, the append touches no block.
        touches_none = self.append_rule == "touched" and not request.decodes and request.length % pool.block_size == 0
        # vLLM wants a free block for each sequence even if the last block has space.
        while step.free < (0 if touches_none else request.sequences):
            victim = later.pop() if later else request
            self._preempt(step, victim)
            if victim is request:
                return False
        step.free -= new_blocks(pool, request, request.blocks)
        return True

    def _preempt(self, step: Step, request: Request) -> None:
        view, blocks = step.view, request.blocks
        step.free += blocks if request.group is None else request.group.freed_blocks()
        if (self.preemption_mode or ("recompute" if request.seats == 1 else "swap")) == "recompute":
            if request.sequences > 1:
                why = f"vLLM aborts (AssertionError): it cannot recompute the {request.sequences} sequences of request"
                raise Stuck(f"{why} {request.id}", requests_in(view), view.now)
            step.preempt.append(Preemption(request))
            return
        need = blocks if self.append_rule == "any_free" else view.pool.blocks_for(request.length)
        if need > step.host_free:
            free = step.host_free
            why = f"vLLM aborts (no CPU swap space): request {request.id} needs {need} host blocks, {free} are free"
            raise Stuck(why, requests_in(view), view.now)
        step.host_free -= blocks
        step.preempt.append(Preemption(request, "swap", "swapped"))

    def swap_in(self, step: Step) -> None:
        """Choose the requests to swap in, as far as blocks, sequences and tokens are left."""
        swapped, pool = step.view.swapped, step.view.pool
        kept_free = self.watermark_blocks(pool)
        for request in swapped if self.swap_order == "swapped" else sorted(swapped, key=lambda r: r.arrival):
            blocks = pool.blocks_for(request.length)
            need = request.host_blocks + request.sequences if self.append_rule == "any_free" else blocks
            if self.fail_infeasible and need > pool.total:
                step.infeasible.append(self._fail_swap_in(request, need, pool.total))
                continue
            # A swap-in is never chunked.
            tokens = request.pending * request.sequences
            if step.free - need < kept_free or step.seats < request.seats or tokens > step.tokens:
                break
            step.free -= request.host_blocks + new_blocks(pool, request, request.host_blocks)
            step.seats -= request.seats
            step.tokens -= tokens
            step.swap_in.append(request)

    def _fail_swap_in(self, request: Request, need: int, total: int) -> Rejection:
        reason, keeps = f"needs {need} blocks to swap in, the pool has {total}", not self.free_failed_swaps
        if keeps:
            reason += f"; vLLM does not free its {request.host_blocks} host blocks"
        return Rejection(request, reason, keeps_host_blocks=keeps)


def check_readmission(view: View, request: Request) -> None:
    """Raise Stuck if vLLM ends here: a recomputed request with other sequences that ended may not be a prompt.

    If its first sequence has ended, vLLM does not see that it is a prompt, and goes on.
    """
    group = request.group
    if group is not None and group.members > 1 and not group.first_ended:
        ended = group.members - 1
        raise Stuck(
            f"vLLM aborts (AssertionError in Scheduler.schedule: a prompt has one sequence): request {request.id} "
            f"is computed again after {ended} of its {group.members} sequences ended",
            requests_in(view),
            view.now,
        )


def new_blocks(pool: BlockPool, request: Request, held: int) -> int:
    """Return the blocks that the next token of a request takes, if it holds this number of blocks."""
    if request.group is not None:
        return request.group.new_blocks(request.length)
    return max(0, pool.blocks_for(request.length) - held)


def seats_of(view: View, running: Queue) -> int:
    """Return the sequences of running requests that count for max_num_seqs."""
    return sum([request.seats for request in running]) if view.has_groups else len(running)
