"""One replica of a fleet: its loop runs up to the next time at which something may come from outside.

A held plan is decided, but its steps wait. They run when a request comes, up to its arrival, or when one of them may
finish a request before the fleet goes on. So arrivals at other replicas cost nothing, and the steps are those of a
server that knows its arrivals from the beginning.
"""

from __future__ import annotations

import math

from servesim.core import Request
from servesim.routers.router import Replica as Reported

from .loop import Loop
from .server import Server
from .step import Step

NO_ENDS: list[tuple[float, Request]] = []


class Replica:
    """The loop of one server in a fleet."""

    __slots__ = ("_bound", "_call_end", "_calls", "horizon", "idle_s", "loop", "loops", "sent", "wakes_at")

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.loops = [loop]  # also those before a crash or a restart
        loop.in_fleet = True
        self._call_end = 0.0  # see call_end; as it was when this number of model calls had ended
        self._calls = 0
        self._bound = 0.0  # held steps change nothing before this time
        self.horizon = 0.0  # the time up to which it runs now
        self.wakes_at = 0.0  # when it may change something next
        self.idle_s = 0.0  # seconds without a model call
        self.sent = 0  # requests

    def send(self, request: Request) -> None:
        """Add a request that the router sends now."""
        self.sent += 1
        inbox = self.loop.inbox
        inbox.send(request)
        if inbox.next_arrival < self.wakes_at and (self.loop.sleeps or self.loop.held is not None):
            self.wakes_at = inbox.next_arrival

    def replace(self, loop: Loop, now: float) -> None:
        """Go on with a new server, which is empty."""
        self.wait(now)
        self._call_end, self._calls = self.call_end, 0
        self.loops.append(loop)
        self.loop = loop
        loop.in_fleet, loop.now = True, now
        self.wakes_at = now

    def crash(self, now: float) -> None:
        """End the step that runs now. Its results are lost."""
        if self.loop.server.flight is None:
            self.wait(now)
        self.loop.now = now

    @property
    def call_end(self) -> float:
        """When its last model call ended; 0: it had none."""
        return self.loop.now if self.loop.calls > self._calls else self._call_end

    @property
    def is_empty(self) -> bool:
        """Whether it has no request."""
        loop = self.loop
        return loop.server.idle() and not (len(loop.inbox) or loop.has_unreported) and loop.held is None

    def run_until(self, horizon: float) -> float:
        """Run all steps that are decided before a time. Return when something may change next; inf: at a request.

        If an end may bring a request, it is the last step. While it runs, the fleet may lower `horizon`.
        """
        loop, inbox = self.loop, self.loop.inbox
        loop.barrier = self.horizon = horizon
        if not loop.holds:
            return self._run_known(horizon)
        ended = inbox.ended if inbox.stops_at_ends and inbox.ended is not None else NO_ENDS
        ends = len(ended)
        while True:
            if len(ended) > ends:
                self.wakes_at = self.next_event if loop.held is None else self._bound
                return self.next_event
            loop.barrier = horizon = self.horizon
            held = loop.held
            if held is not None:
                if inbox.next_arrival >= horizon and self._bound >= horizon:
                    self.wakes_at = self._bound
                    return self.next_event
                self._run_held_plan(held)
                continue
            time = self.next_event
            if time >= horizon:
                self.wakes_at = time
                return time
            self.wait(time)
            if inbox.stops_at_ends and inbox.timeout is not None:
                loop.admitted = loop.admit(time)  # clients that have given up send their next requests first
                self.wakes_at = time  # the decision that sees them
                if len(ended) > ends:
                    continue
            self._step()

    def _run_held_plan(self, held: Step) -> None:
        loop = self.loop
        loop.run_held(held)
        self.wakes_at = loop.now
        self._go_on()

    def _run_known(self, horizon: float) -> float:
        """Run a replica that knows its requests before a time. A held plan that reaches it waits there."""
        loop = self.loop
        if loop.held is not None:
            self._run_held_plan(loop.held)
        time = self.next_event
        while time < horizon and loop.held is None:
            self.wait(time)
            loop.sleeps = False
            next_event = loop.step()
            time = loop.now if next_event is None else next_event
        self.wakes_at = time
        return time

    def _step(self) -> None:
        loop = self.loop
        loop.sleeps = False
        next_event = loop.step()
        self.wakes_at = loop.now if next_event is None else next_event
        self._go_on()

    def _go_on(self) -> None:
        """After a step: report clients that give up before the next decision, and set the bound of held steps."""
        inbox, held, fast_forward = self.loop.inbox, self.loop.held, self.loop.fast_forward
        if held is not None and fast_forward is not None:
            self._bound = fast_forward.earliest_end(held)
        if inbox.tells_timeouts:
            inbox.report_timeouts(self.loop.now)
            self._bound = min(self._bound, inbox.next_timeout())

    @property
    def next_event(self) -> float:
        """The time before which it changes nothing: its next decision, or the end of a held step."""
        time = self.wakes_at
        if self.loop.sleeps or self.loop.held is not None:
            time = min(time, self.loop.inbox.next_arrival)
        return max(self.loop.now, time)

    def wait(self, time: float) -> None:
        """Go on at a later time, without a model call."""
        if time > self.loop.now:
            self._call_end, self._calls = self.call_end, self.loop.calls
            self.idle_s += time - self.loop.now
            self.loop.now = time

    def finish(self) -> None:
        """Raise Stuck if requests remain, now that no more will come."""
        self.loop.in_fleet = False
        self.loop.require_done()

    @property
    def server(self) -> Server:
        return self.loop.server

    def run_held(self, now: float, pauses: bool = False) -> None:
        """Run the held steps that are decided before now; `pauses`: their plan may go on later."""
        loop = self.loop
        loop.pauses = pauses
        while loop.held is not None and not (pauses and loop.now >= now):
            self._bound = -math.inf
            self.run_until(now)
        loop.pauses = True

    def report(self, ending: int) -> Reported:
        """Return what the replica says about itself; some requests end with the step that runs now."""
        server, port, fast_forward = self.loop.server, self.loop.port, self.loop.fast_forward
        waiting = len(server.waiting) + len(server.swapped) + (0 if port is None else len(port.queue))
        blocks = server.pool.held + (0 if fast_forward is None else fast_forward.blocks_taken)
        return Reported(waiting, len(server.running) + ending, blocks / max(1, server.pool.total))
