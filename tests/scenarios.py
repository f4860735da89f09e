"""Run small hand-worked scenarios; every step takes 1 s unless a test sets a cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional

from servesim.core import Policy, Request, Stuck
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.rules import rules_of
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step, batch


@dataclass
class RunLog:
    """Record of a run: each list has one entry per event, starting with its time."""

    requests: dict[Any, Request]
    server: Server
    steps: list[tuple[float, list[tuple[Any, int]]]] = field(default_factory=list)
    preempted: list[tuple[float, Any, str]] = field(default_factory=list)
    swapped_in: list[tuple[float, Any]] = field(default_factory=list)
    rejected: list[tuple[float, Any]] = field(default_factory=list)
    released: list[tuple[float, Any]] = field(default_factory=list)
    finish_time: float = 0.0
    stuck: Optional[Stuck] = None

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        now = step.decided
        if step.runs_model:
            self.steps.append((now, batch(server.running, step)))
        self.preempted += [(now, request.id, mode) for request, mode, _ in step.preempted]
        self.swapped_in += [(now, request.id) for request in step.plan.moves.swap_in]
        self.rejected += [(now, rejection.request.id) for rejection in step.plan.moves.reject]
        self.released += [(now, request.id) for request in step.plan.moves.release]

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        pass

    def order(self) -> list[Any]:
        """Return the ids in order of their first scheduling."""
        started = [request for request in self.requests.values() if request.scheduled is not None]
        return [request.id for request in sorted(started, key=lambda request: request.scheduled or 0.0)]


def serve(
    policy: Policy,
    requests: list[Request],
    blocks: int = 1000,
    block_size: int = 1,
    cost: Optional[LinearCost] = None,
    rejects_oversized: Optional[bool] = None,
    **engine: Any,
) -> RunLog:
    """Serve requests step by step, and check the state of the server after each step."""
    server = Server(policy, blocks + rules_of(policy).reserved_blocks, block_size, **engine)
    server.limits.change(None, rejects_oversized)
    log = RunLog({request.id: request for request in requests}, server)
    clock = SimulatedClock(cost or LinearCost(base=1.0))
    loop = Loop(server, Inbox(requests), clock, (log,), check=True)
    try:
        log.finish_time = loop.run()
    except Stuck as stuck:
        log.stuck = stuck
    return log


def run_steps(loop: Loop, count: int) -> None:
    """Run a number of decisions, and the steps that return before the next one."""
    for request in loop.inbox.clients.coming:
        loop.send(request)
    while loop.next_time < math.inf and (count or loop.returns_first):
        count -= not loop.returns_first
        loop.advance()
