"""Code of both vLLM v0 schedulers, policy.py and chunked.py: rules, blocks, preemption, swap-in, delay factor.

`length` is the prompt plus the generated tokens. The newest token is not cached, so a decode needs blocks for `length`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Optional

from servesim.core import (
    BlockPool,
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
    first_time_after,
)
from servesim.core.native import mypyc_attr
from servesim.engine.rules import EngineRules
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


class DelayState(NamedTuple):
    """Policy state of the delay factor."""

    prefill_start: Optional[float] = None  # start of the last prefill, until its latency is measured
    latency: float = 0.0  # seconds from the start of the last prefill to the next step


class DelayGate:
    """Applies vLLM's scheduler_delay_factor during one call of `decide`. The constructor measures the last latency.

    Prompts wait for a multiple of the latency of the last prefill: the oldest waiting request must have waited that
    long. If no request runs, there is no delay. Three scopes:

    queue                0.4.1 - 0.5.3: one test per step; then the whole queue may be admitted
    request              0.4.0: one test per admission; requests admitted in this step count as running
    request-unless-idle  0.5.4 - 0.10: one test per admission; requests admitted in this step do not count as running
    """

    def __init__(self, factor: float, scope: str, view: View, state: DelayState) -> None:
        if state.prefill_start is not None:
            state = DelayState(None, view.now - state.prefill_start)
        self.state = state
        self.wake_at: Optional[float] = None  # time at which the delayed request may be admitted
        self._wait = factor * state.latency
        self._scope = scope
        self._view = view
        self._oldest: list[float] = []  # earliest arrival time from each queue position on

    def allows(self, removed: int, admitted: int) -> bool:
        """Return whether the next request may be admitted. `removed` and `admitted` count those of this step."""
        if not self._view.running and (self._scope != "request" or not admitted):
            return True
        oldest = self._view.waiting.oldest() if self._scope == "queue" or not removed else self._oldest_from(removed)
        if self._view.now - oldest > self._wait:
            return True
        self.wake_at = first_time_after(oldest, self._wait)
        return False

    def _oldest_from(self, position: int) -> float:
        if not self._oldest:
            arrivals = [request.arrival for request in self._view.waiting]
            self._oldest = list(accumulate(reversed(arrivals), min))[::-1]
        return self._oldest[position]

    def state_after_prefill(self) -> DelayState:
        """Return the policy state of a step with a prefill."""
        return DelayState(self._view.now, self.state.latency)


class BlockPlan:
    """Free blocks after the allocations of the step so far, and its preemptions so far."""

    def __init__(self, view: View, free: Optional[int] = None) -> None:
        self.view = view
        self.free = view.pool.free if free is None else free
        self.host_free = view.pool.host_free
        self.preempt: list[Preemption] = []


class SwapInResult(NamedTuple):
    """The swapped requests that a step swaps in or rejects."""

    free: int  # blocks left
    seats: int  # sequences left
    tokens: int  # left in the step
    swapped_in: Sequence[Request] = ()
    infeasible: Sequence[Rejection] = ()


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

    def delay_gate(self, view: View) -> Optional[DelayGate]:
        """Return the delay gate, or None without a delay."""
        return DelayGate(self.delay_factor, self.delay_scope, view, view.state) if self.delays else None

    def watermark_blocks(self, pool: BlockPool) -> int:
        """Return the number of blocks that an admission or a swap-in must leave free."""
        return int(self.watermark * pool.total)

    def append_or_preempt(self, block_plan: BlockPlan, request: Request, later: deque[Request]) -> bool:
        """Allocate the blocks of the next token of a request. Return False if the request itself was preempted.

        If blocks are missing, preempt the last request of `later`.
        """
        pool = block_plan.view.pool
        # A partly computed prompt holds the blocks of its length. If these are full, the append touches no block.
        touches_none = self.append_rule == "touched" and not request.decodes and request.length % pool.block_size == 0
        # vLLM wants a free block for each sequence even if the last block has space.
        while block_plan.free < (0 if touches_none else request.sequences):
            victim = later.pop() if later else request
            self._preempt(block_plan, victim)
            if victim is request:
                return False
        block_plan.free -= new_blocks(pool, request, request.blocks)
        return True

    def _preempt(self, block_plan: BlockPlan, request: Request) -> None:
        view, blocks = block_plan.view, request.blocks
        block_plan.free += blocks if request.group is None else request.group.freed_blocks()
        if (self.preemption_mode or ("recompute" if request.seats == 1 else "swap")) == "recompute":
            if request.sequences > 1:
                why = f"vLLM aborts (AssertionError): it cannot recompute the {request.sequences} sequences of request"
                raise Stuck(f"{why} {request.id}", requests_in(view), view.now)
            block_plan.preempt.append(Preemption(request))
            return
        need = blocks if self.append_rule == "any_free" else view.pool.blocks_for(request.length)
        if need > block_plan.host_free:
            free = block_plan.host_free
            why = f"vLLM aborts (no CPU swap space): request {request.id} needs {need} host blocks, {free} are free"
            raise Stuck(why, requests_in(view), view.now)
        block_plan.host_free -= blocks
        block_plan.preempt.append(Preemption(request, "swap", "swapped"))

    def check_readmission(self, view: View, request: Request) -> None:
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

    def choose_swap_ins(self, view: View, free: int, seats: int, tokens: int) -> SwapInResult:
        """Return the requests to swap in. The arguments are what is left: blocks, sequences and tokens of the step."""
        if not view.swapped:
            return SwapInResult(free, seats, tokens)
        pool, watermark_blocks = view.pool, self.watermark_blocks(view.pool)
        queue = view.swapped if self.swap_order == "swapped" else sorted(view.swapped, key=lambda r: r.arrival)
        swapped_in: list[Request] = []
        infeasible: list[Rejection] = []
        for request in queue:
            blocks = pool.blocks_for(request.length)
            need = request.host_blocks + request.sequences if self.append_rule == "any_free" else blocks
            if self.fail_infeasible and need > pool.total:
                infeasible.append(self._fail_swap_in(request, need, pool.total))
                continue
            # A swap-in is never chunked.
            new_tokens = request.pending * request.sequences
            if free - need < watermark_blocks or seats < request.seats or new_tokens > tokens:
                break
            free -= request.host_blocks + new_blocks(pool, request, request.host_blocks)
            seats -= request.seats
            tokens -= new_tokens
            swapped_in.append(request)
        return SwapInResult(free, seats, tokens, swapped_in, infeasible)

    def _fail_swap_in(self, request: Request, need: int, total: int) -> Rejection:
        reason, keeps = f"needs {need} blocks to swap in, the pool has {total}", not self.free_failed_swaps
        if keeps:
            reason += f"; vLLM does not free its {request.host_blocks} host blocks"
        return Rejection(request, reason, keeps_host_blocks=keeps)


def new_blocks(pool: BlockPool, request: Request, held: int) -> int:
    """Return the blocks that the next token of a request takes, if it holds this number of blocks."""
    if request.group is not None:
        return request.group.new_blocks(request.length)
    return max(0, pool.blocks_for(request.length) - held)


def seats_of(view: View, running: Queue) -> int:
    """Return the sequences of running requests that count for max_num_seqs."""
    return sum([request.seats for request in running]) if view.has_groups else len(running)
