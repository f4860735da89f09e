"""Schedulers of vllm-ascend that change the budget or the preemption of vLLM V1.

SchedulerDynamicBatch takes the token budget from a table, ProfilingChunkScheduler gives every step a time budget,
RecomputeScheduler hands preempted requests back, and BalanceScheduler admits only if no data-parallel rank is full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Optional

from servesim.core import (
    NO_HOLD,
    NO_MOVES,
    AtLeast,
    Chunk,
    Float0,
    Int0,
    Plan,
    Rejection,
    Reorder,
    Request,
    Stuck,
    View,
)
from servesim.core.limits import is_number
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import prefilling_is_last, requests_in
from servesim.policies.vllm_v1.policy import VLLMV1
from servesim.policies.vllm_v1.rules import VLLMRules
from servesim.policies.vllm_v1.step_pass import Pass

from .rules import AscendRules, BalanceRules

COLUMNS = ("ctx_len", "d_num", "chunk_size", "cost")  # of profile_table.csv
MULTIPLE = 64  # chunks of equal time are rounded up to a multiple of this, or of a larger block size


def with_state(plan: Plan, state: Any) -> Plan:
    """Return a plan with a policy state. Plans without chunks and moves may be shared, so they are copied."""
    if plan.chunks or plan.moves is not NO_MOVES:
        plan.state = state
        return plan
    return Plan(decode=plan.decode, hold=plan.hold, state=state)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendV1(VLLMV1):
    """The fields that the schedulers of vllm-ascend on vLLM V1 share: those of vLLM, with the defaults of 0.25."""

    version: str = "0.25.1"  # version of vLLM under the plug-in
    async_scheduling: bool = False  # decide a step while the last one runs

    def _require_known(self) -> None:
        known: dict[str, object] = {"pipeline_parallel_size": 1, "num_speculative_tokens": 0}
        if not self.can_overlap:
            known["async_scheduling"] = False
        for name, off in known.items():
            value = getattr(self, name)
            if value != off:
                raise ValueError(f"{name}: expected {off}, its rules with this scheduler are not modelled, got {value}")

    @property
    def can_overlap(self) -> bool:
        """Whether the rules of asynchronous scheduling are known."""
        return False


class BudgetTable(NamedTuple):
    """Token budgets by context and number of decoding requests. Made once, and kept as the policy state."""

    budgets: dict[tuple[int, int], int]
    contexts: Sequence[int]  # keys in the order in which the engine tries them
    counts: Sequence[int]
    smallest: int  # of the budgets

    def budget(self, tokens: int, count: int) -> int:
        """Return the budget for decoding requests with this number of tokens in all; 0: the table has none."""
        for context in self.contexts:
            if context >= tokens / count:
                for number in self.counts:
                    if number >= count:
                        return self.budgets.get((context, number), 0)
                break
        return 0


class BatchPass(Pass):
    """One decision of SchedulerDynamicBatch. With priorities it has a defect: a step keeps a request that it preempts.

    Such a request waits with computed tokens. The engine ends when it admits it: it calls a function that is missing.
    """

    def put_off(self, victim: Request) -> None:
        if victim in self.scheduled:
            why = "vllm-ascend ends (AttributeError in schedule) after it preempts a request of the same step"
            raise Stuck(why, [victim], self.view.now)
        super().put_off(victim)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendDynamicBatch(AscendV1):
    """vllm-ascend 0.12 to 0.23: the token budget of a step comes from a table of measured step times."""

    version: str = "0.13.0"  # version of vLLM under the plug-in
    scheduler_reserve_full_isl: bool = False  # admit only if the blocks of the whole prompt are free (from 0.19)
    # largest step time of the table that is used, in its unit; -1: off
    slo_limits_for_dynamic_batch: Annotated[float, AtLeast(-1)] = -1.0
    profile_table: tuple[Any, ...] = ()  # rows of profile_table.csv: [ctx_len, d_num, chunk_size, cost]

    def __post_init__(self) -> None:
        super().__post_init__()
        for row in self.profile_table:
            if not isinstance(row, (list, tuple)) or len(row) != len(COLUMNS) or not all(map(is_number, row)):
                raise ValueError(f"profile_table: expected rows of {', '.join(COLUMNS)}, got {row!r}")

    def rules(self) -> VLLMRules:
        return AscendRules(self, "SchedulerDynamicBatch of vllm-ascend 0.13.0")

    def initial_state(self) -> Any:
        limit, budgets = self.slo_limits_for_dynamic_batch, dict[tuple[int, int], int]()
        for context, count, chunk, cost in self.profile_table:
            if limit > 0 and cost <= limit:
                key = int(context), int(count)
                budgets[key] = max(int(chunk), budgets.get(key, 0))
        # The engine searches sets: the first key in their order that is large enough wins, not the smallest one.
        contexts, counts = (sorted({key[index] for key in budgets}) for index in range(2))
        return BudgetTable(
            budgets, list(set(contexts)), list(set(counts)), min(budgets.values(), default=self.max_num_batched_tokens)
        )

    def decide(self, view: View) -> Plan:
        table, budget = view.state, self.max_num_batched_tokens
        resumed = [request for request in view.prefilling if request.cached >= request.prompt]
        count = view.decoding + len(resumed)
        if count and table.budgets:
            tokens = view.cohort.context + view.decoding + sum([request.length for request in resumed])
            budget = table.budget(tokens, count) or budget
        unfinished = [request for request in view.prefilling if request.cached < request.prompt]
        in_order = prefilling_is_last(view.running, unfinished)
        plan = self.schedule(view, budget) if in_order else self._decodes_first(view, budget)
        if budget > self.max_num_batched_tokens:
            self._check(view, plan)
        plan = with_state(plan, table)
        full, enough = len(view.running) >= self.max_num_seqs, min(table.smallest, self.max_num_batched_tokens)
        if plan.hold.steps and (view.decoding > enough or view.prefilling or (view.waiting and not full)):
            plan.hold = NO_HOLD  # the budget depends on the contexts, which grow
        return plan

    def make_pass(self, view: View, tokens: int, free: int) -> Pass:
        return BatchPass(self, view, tokens, free)

    def _decodes_first(self, view: View, budget: int) -> Plan:
        """Schedule decodes before unfinished prompts, and keep this order of the running queue."""
        running = sorted(view.running, key=lambda request: request.cached < request.prompt)
        plan = self.schedule_in_order(view, running, budget)
        gone = {preemption.request for preemption in plan.preempt}
        admitted = [chunk.request for chunk in plan.chunks if chunk.request.status == "waiting"]
        plan.reorder = Reorder(running=[request for request in running if request not in gone] + admitted)
        return plan

    def _check(self, view: View, plan: Plan) -> None:
        """Raise Stuck if the table gives a step more tokens than vLLM allows."""
        tokens = sum([chunk.tokens for chunk in plan.chunks]) + (view.decoding if plan.decode else 0)
        if tokens > self.max_num_batched_tokens:
            why = f"vLLM aborts (AssertionError in schedule): {tokens} tokens are above max_num_batched_tokens"
            raise Stuck(why, requests_in(view), view.now)


class TimePass(Pass):
    """One decision whose step also has a time: prompts end when the time is over, decodes cost none."""

    def __init__(self, policy: AscendProfilingChunk, view: View, tokens: int, free: int) -> None:
        super().__init__(policy, view, tokens, free)
        self.times = policy
        self.multiple = max(view.pool.block_size, MULTIPLE)  # chunks are rounded up to it
        self.target = self.time = policy.target
        self.is_over = False  # no further running request runs: no chunk of one takes the time that is left
        self.spares_first = False

    @property
    def room(self) -> int:
        return self.tokens if self.time > 0 and not self.is_over else 0

    def limit(self, request: Request, computed: int, tokens: int) -> int:
        return self.chunk(computed, tokens) if computed < request.prompt else tokens

    def chunk(self, computed: int, tokens: int) -> int:
        """Return how many of these tokens take the time that is left."""
        chunk = self.times.chunk_for(self.time, computed)
        if chunk is not None:
            return min(tokens, max(1, -(-chunk // self.multiple)) * self.multiple)
        self.is_over = self.time != self.target
        return 0 if self.is_over else tokens

    def admit(self, chunks: list[Chunk]) -> bool:
        self.is_over = False
        return super().admit(chunks)

    def first_tokens(self, request: Request, cached: int) -> int:
        tokens = self.chunk(cached, min(request.length - cached, self.max_chunk))
        if tokens > self.tokens and not self.policy.enable_chunked_prefill:
            return 0
        return min(tokens, self.tokens)

    def spend(self, request: Request, computed: int, tokens: int) -> None:
        self.tokens -= tokens
        if request.status == "waiting":
            computed = 0  # the engine forgets the cached tokens here
        if computed < request.prompt:
            self.time -= self.times.time_of(computed + tokens) - self.times.time_of(computed)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendProfilingChunk(AscendV1):
    """vllm-ascend since 0.19: chunks of a prompt take equal times. The time of n tokens is a n^2 + b n + c."""

    fitted_a: float = 0.0  # a, as the engine fits it to its own step times; if a and b are 0, vLLM's rules apply
    fitted_b: float = 0.0  # b
    smooth_factor: Float0 = 1.0  # how far a chunk goes from max_num_batched_tokens to the size of equal time
    min_chunk: Int0 = 4096  # smallest chunk

    def rules(self) -> VLLMRules:
        return AscendRules(self, "ProfilingChunkScheduler of vllm-ascend 0.25.1rc1")

    def make_pass(self, view: View, tokens: int, free: int) -> Pass:
        return TimePass(self, view, tokens, free)

    def time_of(self, tokens: int) -> float:
        """Return the fitted time of a prompt, without the constant part."""
        return self.fitted_a * tokens * tokens + self.fitted_b * tokens

    @property
    def target(self) -> float:
        """The time of a step."""
        time = self.time_of(self.max_num_batched_tokens)
        return time if time > 0 else 1.0

    def chunk_for(self, time: float, computed: int) -> Optional[int]:
        """Return the largest chunk after these computed tokens; None: no size takes this time."""
        a, b = self.fitted_a, 2 * self.fitted_a * computed + self.fitted_b
        square = b * b + 4 * a * time
        if not a or square < 0:  # the engine finds no size without a either
            return None
        size, base = (math.sqrt(square) - b) / (2 * a), self.max_num_batched_tokens
        if size <= 0:
            return None
        return max(int(base + self.smooth_factor * (size - base)), self.min_chunk)

    def decide(self, view: View) -> Plan:
        if prefilling_is_last(view.running, view.prefilling):
            return self.schedule(view, self.max_num_batched_tokens)
        # A decode behind a prompt does not run if the prompt takes all the time.
        return self.schedule_in_order(view, view.running, self.max_num_batched_tokens)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendRecompute(AscendV1):
    """vllm-ascend on a decode node (KV consumer): a preempted request is handed back, to run on a prefill node."""

    kv_consumer: bool = True  # the node gets the KV cache of prompts from others; otherwise the rules are those of vLLM

    def rules(self) -> VLLMRules:
        return AscendRules(self, "RecomputeScheduler of vllm-ascend 0.25.1rc1")

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1] if self.kv_consumer else super().victim(running)

    def decide(self, view: View) -> Plan:
        plan = self.schedule(view, self.max_num_batched_tokens)
        if not (plan.preempt and self.kv_consumer):
            return plan
        return Plan(
            reject=[Rejection(gone.request, "recomputed", "aborted") for gone in plan.preempt], chunks=plan.chunks
        )


class BalancePass(Pass):
    """One decision, which admits no request if a rank is full."""

    def admit(self, chunks: list[Chunk]) -> bool:
        ranks: Sequence[int] = self.view.engine or ()
        return max(ranks, default=0) < self.policy.max_num_seqs and super().admit(chunks)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendBalance(AscendV1):
    """vllm-ascend with data parallelism: no rank admits a request while one rank runs max_num_seqs requests."""

    def rules(self) -> VLLMRules:
        return BalanceRules(self, "BalanceScheduler of vllm-ascend 0.25.1rc1")

    def make_pass(self, view: View, tokens: int, free: int) -> Pass:
        return BalancePass(self, view, tokens, free)
