"""Small scenarios worked by hand: every step takes a second unless a cost says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from servesim.core import Policy, Request, Stuck
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step, batch


@dataclass
class Story:
    """What happened: turns that ran, moved or rejected something, as (t, batch) and (t, moves)."""

    requests: dict[Any, Request]
    server: Server
    ran: list[tuple[float, list[tuple[Any, int]]]] = field(default_factory=list)
    evicted: list[tuple[float, Any, str]] = field(default_factory=list)
    swapped_in: list[tuple[float, Any]] = field(default_factory=list)
    fetched: list[tuple[float, Any]] = field(default_factory=list)
    rejected: list[tuple[float, Any]] = field(default_factory=list)
    released: list[tuple[float, Any]] = field(default_factory=list)
    end: float = 0.0
    stuck: Optional[Stuck] = None

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        now = step.start
        if step.calls:
            self.ran.append((now, batch(server.running, step)))
        self.evicted += [(now, request.id, how) for request, how, _ in step.evicted]
        self.swapped_in += [(now, request.id) for request in step.plan.moves.swap_in]
        self.fetched += [(now, request.id) for request in step.plan.moves.fetch]
        self.rejected += [(now, rejection.request.id) for rejection in step.plan.moves.reject]
        self.released += [(now, request.id) for request in step.plan.moves.release]

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        pass

    def order(self) -> list[Any]:
        """Return who started when, the first first."""
        started = [request for request in self.requests.values() if request.scheduled is not None]
        return [request.id for request in sorted(started, key=lambda request: request.scheduled or 0.0)]


def serve(
    policy: Policy,
    requests: list[Request],
    blocks: int = 1000,
    block_size: int = 1,
    cost: Optional[LinearCost] = None,
    **engine: Any,
) -> Story:
    """Serve requests turn by turn, with the books checked after each."""
    server = Server(policy, blocks + policy.traits.reserved_blocks, block_size, **engine)
    story = Story({request.id: request for request in requests}, server)
    clock = SimulatedClock(cost or LinearCost(base=1.0))
    loop = Loop(server, Inbox(requests), clock, (story,), check=True)
    try:
        story.end = loop.run()
    except Stuck as stuck:
        story.stuck = stuck
    return story
