"""LightLLM: it admits requests every few steps, if their estimated peak of cached tokens fits.

LightLLM counts memory in tokens: use `block_size: 1`. Larger blocks work and are rounded up.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import PAST_FINISH, Chunk, Float0, Int0, Int1, Plan, Policy, Preemption, Request, View
from servesim.core.native import mypyc_attr

from .rules import LightLLMRules

MAX_REQ_TOTAL_LEN = 2048 + 1024  # LightLLM's default max_req_total_len, if the scenario has no max_model_len


class RouterState(NamedTuple):
    """Policy state of LightLLM's router."""

    decodes: int = 0  # decode steps since the last admission
    paused: int = 0  # number of preempted requests in waiting (LightLLM calls them paused)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class LightLLM(Policy):
    """Every max_wait_tokens decodes, LightLLM admits prompts if the estimated peak of all requests fits."""

    batch_max_tokens: Optional[Int1] = None  # prompt tokens per prefill; null: max(pool tokens / 6, max_model_len)
    running_max_req_size: Int1 = 1000  # maximum running and preempted requests
    max_wait_tokens: Int0 = 10  # decode steps between two admissions
    # from this used fraction of the pool on, outputs are expected to reach their limit
    router_token_ratio: Float0 = 0.0
    router_max_new_token_len: Int1 = 1024  # expected output tokens while a smaller fraction is used
    ignore_eos: bool = False  # every output is expected to reach its limit
    splitfuse_mode: bool = False  # chunked prefill in the same steps as decodes
    splitfuse_block_size: Int1 = 256  # tokens per chunk (splitfuse_mode)

    def rules(self) -> LightLLMRules:
        rules = LightLLMRules(
            "LightLLM 4b037f68 (2024-04-15)", "recordings of LightLLM's RouterManager and ReqQueue, step by step"
        )
        rules.one_token_decodes = self.splitfuse_mode
        rules.slots_field, rules.budget_fields = "running_max_req_size", ("batch_max_tokens",)
        return rules

    def initial_state(self) -> Any:
        return RouterState()

    def held_state(self, state: Any, now: float) -> Any:
        decodes = state.decodes + 1  # the count restarts at 1 if no request waits
        return RouterState(decodes if decodes <= self.max_wait_tokens else 1, state.paused)

    def decide(self, view: View) -> Plan:
        state: RouterState = view.state
        decodes = state.decodes
        if not view.running:
            return self._admit(view, state) or Plan(state=state)
        if decodes >= self.max_wait_tokens:
            decodes = 0
            plan = self._admit(view, state)
            if plan is not None:
                return plan
        if self._blocks_needed(view) > view.pool.free:
            victim = max(view.running, key=lambda request: (request.arrival, request.serial))
            return Plan(preempt=[Preemption(victim)], state=RouterState(0, state.paused + 1))
        state = RouterState(decodes + 1, state.paused)
        if view.prefilling:
            chunks = [Chunk(request, min(request.pending, self.splitfuse_block_size)) for request in view.running]
            return Plan(chunks=chunks, state=state)
        if view.waiting:
            return Plan(decode=True, hold=max(0, self.max_wait_tokens - state.decodes), state=state)
        return Plan(decode=True, hold=PAST_FINISH, state=state)

    def _blocks_needed(self, view: View) -> int:
        """Return the new blocks of the next step of all running requests."""
        need = view.decode_block_need
        for request in view.prefilling:
            tokens = min(request.pending, self.splitfuse_block_size)
            need += view.pool.blocks_for(request.cached + tokens) - request.blocks
        return need

    def _admit(self, view: View, state: RouterState) -> Optional[Plan]:
        """Return a plan that admits requests, or None. With splitfuse they run from the next step on."""
        admit = self._choose_admissions(view, state.paused) if view.waiting else []
        if not admit:
            return None
        state = RouterState(0, state.paused - sum(request.preemptions > 0 for request in admit))
        if self.splitfuse_mode:
            return Plan(admit=admit, state=state)
        return Plan(chunks=[Chunk(request, request.pending) for request in admit], state=state)

    def _choose_admissions(self, view: View, paused: int) -> list[Request]:
        admit: list[Request] = []
        if len(view.running) + paused >= self.running_max_req_size:
            return admit
        total = view.pool.total * view.pool.block_size
        budget, free = self._token_budget(view, total), view.pool.free
        peak = PeakMemory(self, view, total)
        for request in view.waiting:
            paused -= request.preemptions > 0
            if not peak.fits(request) or len(peak) + paused > self.running_max_req_size:
                break
            tokens = min(request.length, self.splitfuse_block_size) if self.splitfuse_mode else request.length
            blocks = view.pool.blocks_for(tokens)
            if tokens > budget or blocks > free:
                break
            budget -= tokens
            free -= blocks
            admit.append(request)
        return admit

    def _token_budget(self, view: View, total: int) -> int:
        """Return the prompt tokens that an admission may add to the next step."""
        budget = self.batch_max_tokens
        if budget is None:
            max_length = view.max_model_len or MAX_REQ_TOTAL_LEN
            budget = max(total // 6, self.splitfuse_block_size if self.splitfuse_mode else max_length)
        if self.splitfuse_mode:
            budget -= view.decoding
            budget -= sum(min(request.pending, self.splitfuse_block_size) for request in view.prefilling)
        return budget


class PeakMemory:
    """The estimated peak of cached tokens, if every request generates its expected output."""

    def __init__(self, policy: LightLLM, view: View, total: int) -> None:
        self.policy = policy
        self.view = view
        self.total = total
        self.requests: list[Request] = list(view.running)
        # The peak is at most the sum of all maximum lengths. Usually this bound is enough.
        self._bound = sum([request.prompt + request.limit for request in self.requests])
        self._bound += sum(self._chunk_count(request) for request in view.prefilling)
        self._expect_limit = True  # whether outputs are expected to reach their limit
        self._estimates: Optional[list[tuple[int, int]]] = None  # sorted: the longest remaining output first

    def __len__(self) -> int:
        return len(self.requests)

    def fits(self, request: Request) -> bool:
        """Add a request and return whether the peak of all requests fits into the pool."""
        self.requests.append(request)
        self._bound += request.prompt + request.limit + self._chunk_count(request)
        if self._bound < self.total:
            return True
        if self._estimates is None:
            used = self.view.cohort.context + sum(request.cached for request in self.view.prefilling)
            self._expect_limit = self.policy.ignore_eos or used / self.total >= self.policy.router_token_ratio
            self._estimates = sorted(map(self._estimate, self.requests))
        else:
            insort(self._estimates, self._estimate(request))
        return self._peak(self._estimates) < self.total

    def _chunk_count(self, request: Request) -> int:
        return -(-request.pending // self.policy.splitfuse_block_size) if self.policy.splitfuse_mode else 0

    def _estimate(self, request: Request) -> tuple[int, int]:
        """Return two numbers: the negated tokens that a request may still generate, and the tokens that it holds."""
        written, length = request.written, request.length
        output = request.limit
        if not self._expect_limit:
            output = min(output, max(int(1.1 * written), self.policy.router_max_new_token_len))
        if self.policy.splitfuse_mode:
            return -max(0, self._chunk_count(request) + output - written - 1), length
        if request.status == "running":
            return -max(0, output - written - 1), length
        return -max(0, output - written - 2), length + 1  # its prefill generates one token

    def _peak(self, estimates: list[tuple[int, int]]) -> int:
        """Return the peak. It is at the finish of a request, when the longer ones hold all tokens generated so far."""
        peak = total = 0
        for count, (negated_remaining, tokens) in enumerate(estimates, 1):
            total += tokens
            peak = max(peak, total - count * negated_remaining)
        return peak
