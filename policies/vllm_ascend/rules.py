"""Rules of vllm-ascend and vllm-mindspore that differ from those of vLLM V1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Optional

from servesim.core import Chunk, Policy, Preemption, Request
from servesim.core.native import mypyc_attr
from servesim.engine.state import ServerState
from servesim.engine.step import Step
from servesim.policies.vllm_v1.rules import VLLMRules
from servesim.policies.vllm_v1.settings import VLLMSettings, version_number

AFTER_STEP: Final = "after step"  # Preemption.extra: see MindSporeRules


@mypyc_attr(allow_interpreted_subclasses=True)
class AscendRules(VLLMRules):
    """Rules of the schedulers of vllm-ascend on vLLM V1; `scheduler` is name and version of the class."""

    def __init__(self, policy: VLLMSettings, scheduler: str) -> None:
        super().__init__(
            f"{scheduler} on vLLM {policy.version}",
            f"recordings of the real {scheduler}",
            2 if policy.async_scheduling else 1,
            policy.enable_prefix_caching,
            version_number(policy.version),
        )

    def token_budget(self, policy: Policy) -> Optional[int]:
        return None  # some of them have further limits

    def runs_as_decode(self, chunk: Chunk) -> bool:
        """Whether it is the last token of a preempted request, but not its first chunk after an admission."""
        return chunk.request._cached != chunk.cached and super().runs_as_decode(chunk)


class BalanceRules(AscendRules):
    """Rules of BalanceScheduler: every rank knows how many requests run on each (`View.engine`)."""

    def exchange(self, state: ServerState, running: Sequence[int]) -> None:
        state.view.engine = running


class MindSporeRules(AscendRules):
    """Rules of vllm-mindspore. With priorities it has a defect: it preempts a request that it has scheduled.

    The blocks of such a request are free at once, but the step still computes its next token. When the step ends, the
    engine takes one token of it for computed.
    """

    def preempt(self, state: ServerState, preemption: Preemption, now: float) -> int:
        if preemption.extra != AFTER_STEP:
            return super().preempt(state, preemption, now)
        state.pool.free += state.pool.blocks_for(preemption.request.length)
        return 0

    def process_results(self, state: ServerState, step: Step, finished: list[Request], now: float) -> None:
        for preemption in step.plan.moves.preempt:
            if preemption.extra == AFTER_STEP:
                request = preemption.request
                state.pool.free -= request.blocks
                if request not in finished:
                    state.preempt(Preemption(request), now)
                    request._cached = 1
                    state.kv_use.tokens += 1
        super().process_results(state, step, finished, now)

    def check_waiting(self, request: Request) -> None:
        """Verify nothing: a waiting request may have one computed token."""

    def live_refusal(self) -> Optional[str]:
        return (
            "policy: a live run cannot compute a request whose blocks another one has, as vllm-mindspore does with "
            "priorities; expected policy.policy: fcfs"
        )
