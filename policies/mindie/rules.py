"""Rules of MindIE-LLM beside its scheduler: it polls, and finished requests stay in their queue for a round."""

from __future__ import annotations

from typing import Optional

from servesim.core import Request, Stuck, View
from servesim.engine.rules import EngineRules
from servesim.engine.state import ServerState


def engine_died(message: str, request: Request, view: View) -> Stuck:
    """Return the error with which MindIE's scheduler ends."""
    return Stuck(f"MindIE's scheduler thread ends with an exception: {message}", [request], view.now)


class MindIERules(EngineRules):
    """Rules of MindIE-LLM 3.0.0."""

    def __init__(self, steps_in_flight: int, max_prompt: Optional[int]) -> None:
        super().__init__("MindIE-LLM 3.0.0", "recordings of the real scheduler of 3.0.0", steps_in_flight)
        self.rejects_oversized = False  # the scheduler dies of such a request
        self.rejects_full_prompts = True
        self.max_prompt = max_prompt
        self.aborts_lost = False
        self.slots_field, self.budget_fields = "max_batch_size", ("max_prefill_tokens", "max_prefill_batch_size")
        self.empty_step = 0.001
        self.polls = True
        self.frees_late = True

    def finish(self, state: ServerState, request: Request, now: float, failed: bool) -> None:
        """Mark a request, which stays in its queue and holds its blocks until a plan releases it."""
        state.take_out(request, stays=True)
        state.finished.push(request)
        state.mark_finished(request, now, failed)

    def release(self, state: ServerState, request: Request) -> None:
        # One that runs has blocks, one that is swapped has them on the host.
        queue = state.running if request._blocks else state.swapped if request.host_blocks else state.waiting
        queue.remove(request)
        state.pool.host_free += request.host_blocks
        request.host_blocks = 0
        state.release(request)

    def may_load(self, state: ServerState, request: Request, blocks: int, started: int) -> bool:
        """Whether 5 % of the blocks are free, and the prompt fits into the tokens and the seats of a round."""
        pool, seats, policy = state.pool, self.slots(state.policy) or 0, state.policy
        if started >= (self.setting(policy, "max_prefill_batch_size") or seats) or pool.free < pool.total // 20:
            return False
        if pool.blocks_for(request.prompt) > pool.total:
            raise engine_died("a prompt can never be allocated", request, state.view)
        return blocks <= pool.free and request.prompt <= pool.free * pool.block_size - seats

    def may_join(self, state: ServerState) -> bool:
        return True  # its seats limit a round

    def repeat_plan(self, state: ServerState) -> None:
        for request in list(state.finished):
            self.release(state, request)
