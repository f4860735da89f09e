"""What the first waiting request lacks: a slot, tokens of the step's budget, or KV blocks, and for how many seconds.

How it works. After a plan is carried out, the reason is noted. It holds until a decision finds another one. If no
request waits, running requests may: for a slot if more run than a step has, for the budget if the prompt of one is not
in the step. A request that a policy lets wait on purpose lacks nothing.

Why it is exact. While a plan holds, nothing is decided. So a held plan keeps its reason: a new one needs
another first request, a prompt in the step, or a request that moves or finishes. Seconds are added when the reason
changes, so they are the same floats if the policy is asked in every step.
"""

from __future__ import annotations

from typing import Final, Optional

from servesim.core import FOREVER, Request

from .state import ServerState
from .step import Step

NOTHING: Final = 0
SLOTS: Final = 1
BUDGET: Final = 2
BLOCKS: Final = 3
REASONS: Final = ("", "slots", "budget", "blocks")
MARGIN: Final = 20  # an engine may keep up to a twentieth of the blocks free


class Waits:
    """The seconds of each reason, of one server."""

    __slots__ = (
        "_budget", "_has_chunks", "_head", "_past_finish", "_reason", "_running", "_seconds", "_since", "_slots",
        "servers",
    )  # fmt: skip

    def __init__(self, slots: Optional[int], budget: Optional[int]) -> None:
        self._slots = FOREVER if slots is None else slots
        self._budget = budget  # tokens of a step; None: the engine has no such limit, or it is not the only one
        self._seconds = [0.0, 0.0, 0.0, 0.0]  # by reason
        self.servers = 1  # whose seconds these are
        self._reason = NOTHING
        self._since = 0.0  # time of the decision that found the reason
        self._head: Optional[Request] = None
        self._running = 0  # running requests at the last decision
        self._has_chunks = False  # the last step had prompts
        self._past_finish = False  # the plan that gave the reason holds while requests finish

    def note(self, state: ServerState, step: Step, now: float) -> None:
        """Note what the first waiting request lacks after a decision."""
        running = len(state.running)
        if state.waiting:
            head = state.waiting[0]
        elif state.swapped:
            head = state.swapped[0]
        else:
            self._head = None
            in_turns = SLOTS if running > self._slots else NOTHING
            self._change(BUDGET if len(state.prefilling) > len(step.chunks) - step.decode_chunks else in_turns, now)
            return
        has_chunks = len(step.chunks) > step.decode_chunks
        held = head is self._head and not has_chunks and not self._has_chunks
        is_same = held and (self._past_finish or (running == self._running and not step.has_moves))
        self._running, self._has_chunks = running, has_chunks
        if not is_same:
            self._head, self._past_finish = head, step.plan.hold.past_finish
            self._change(self._lack(state, step, head), now)

    def go_on(self, state: ServerState, now: float) -> None:
        """Note that a held plan goes on after a request has finished: those that took turns may all have a slot."""
        if self._reason == SLOTS and self._head is None and len(state.running) <= self._slots:
            self._change(NOTHING, now)

    def _lack(self, state: ServerState, step: Step, head: Request) -> int:
        if len(state.running) >= self._slots:
            return SLOTS
        tokens, pool = head.prompt + head._written, state.pool
        if self._budget is not None:
            left = self._budget - step.decode_rows * state.cohort.width
            for chunk in step.chunks:
                left -= chunk.tokens
            if left <= 0:
                return BUDGET
            if tokens <= left:
                return BLOCKS
        if state.limits.blocks_for(tokens) > pool.free + pool.evictable - pool.total // MARGIN:
            return BLOCKS
        return NOTHING if self._budget is None and not step.chunks else BUDGET

    def _change(self, reason: int, now: float) -> None:
        if reason != self._reason:
            self._seconds[self._reason] += now - self._since
            self._reason, self._since = reason, now

    def stop(self, now: float) -> None:
        """Note that the server is gone."""
        self._change(NOTHING, now)

    def add(self, other: Waits, end: float) -> None:
        """Add the seconds of another server, whose run ends at the same time."""
        other.stop(end)
        self.stop(end)
        for reason in (SLOTS, BUDGET, BLOCKS):
            self._seconds[reason] += other._seconds[reason]

    def metrics(self, end: float) -> dict[str, float]:
        """Return the share of the time of a run for each reason."""
        self.stop(end)
        total = end * self.servers
        return {f"waiting_{REASONS[k]}": self._seconds[k] / total if total else 0.0 for k in (SLOTS, BUDGET, BLOCKS)}
