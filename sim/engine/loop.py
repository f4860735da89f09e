"""The engine loop: deliver arrivals, call the policy, carry out its plan, run the model call, record the results.

Simulated and live runs use this loop. They differ in the clock, which says when a call ended, and in `compute`, which
runs the call on a device.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Protocol

from servesim.core import Plan, Rejection, Request, Stuck

from .clocks import Clock
from .inbox import Inbox
from .plans import start_step
from .results import finish_step
from .server import Server
from .step import Step

MAX_STEPS_WITHOUT_CALL = 10_000  # at one time; a policy that moves requests that often would never stop


class Observer(Protocol):
    """Receives a call at the start and at the end of every step, for example the decision log."""

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        """A plan has been carried out."""

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        """Its model call has ended, or there was none."""


class Loop:
    """One server, the requests on their way to it, its clock, and the model call in flight."""

    def __init__(
        self,
        server: Server,
        inbox: Inbox,
        clock: Clock,
        observers: tuple[Observer, ...] = (),
        end_lag: bool = False,
        check: bool = False,
        compute: Optional[Callable[[Step], None]] = None,
    ) -> None:
        self.policy = server.policy
        self.server = server
        self.inbox = inbox
        self.clock = clock
        self.observers = observers
        self.end_lag = end_lag  # clients see the end of a stream only when the next call has ended
        self.check = check  # verify the counts of the server after every step
        self.compute = compute  # runs a model call on a device; a simulation has none
        self.now = 0.0
        self.calls = 0  # model calls ended
        self._idle = True  # no call was in flight before this step
        self._without_call = 0  # steps since a call or a pause
        self._unreported: list[Request] = []  # finished, their clients do not know yet
        self._progress = 0  # the last call that generated a token
        self._written = 0
        self._max_calls_without_token = 1000 + server.pool.total * server.pool.size
        self._no_max_wait = self.policy.max_wait is None
        server.recording = bool(observers)
        # no observer, and a client sees the end of its stream at once and sends nothing after it
        self.plain = not (observers or check or end_lag or inbox.chained)
        self.fast_forward = clock.fast_forward(self)

    def run(self, stop: Optional[Callable[[], bool]] = None) -> float:
        """Serve everything, or until `stop` says so; return the time at which the last call ended."""
        self.clock.drive(self, stop)
        return self.now

    def step(self) -> Optional[float]:
        """Run one step; return None, or, if nothing can run now, the time of the next event (inf: all is served)."""
        server, now = self.server, self.now
        arrived = self._deliver(now) if self.inbox.next_arrival <= now or self.inbox.lobby else []
        if not self._no_max_wait:
            server.promote(now)
        view = server.view
        view.now, memory = now, view.memory
        plan = self.policy.decide(view)
        step = start_step(server, plan, now)
        if step.moved or self.observers:
            self._notify_start(step, arrived, now)
        if not (step.decoders or step.chunks or step.calls):
            return self._no_call(step, memory)
        self._idle, self._without_call = False, 0
        if step.hold and self.fast_forward is not None:
            self.now = self.fast_forward.run(step, now)
            return None
        if self.compute is not None:
            self.compute(step)
        self.now = now = self.clock.end_of(step, now, server.traits)
        self._finish(step, now)
        return None

    def _deliver(self, now: float) -> list[Request]:
        """Show the scheduler what has arrived."""
        inbox, server = self.inbox, self.server
        arrived = inbox.due(now, self.calls, self._idle)
        for request in arrived:  # a front end that lags is what it waited for; otherwise it has queued all along
            server.submit(request, now, request.arrival + inbox.seconds if inbox.lag == 1 else now)
            if request.place == "done":
                self._report(request, now)
        return arrived

    def _no_call(self, step: Step, memory: Any) -> Optional[float]:
        """Go on at once if a request moved or the policy's state changed; else rest until the next event."""
        if step.moved or step.plan.memory != memory:
            for observer in self.observers:
                observer.ended(self.server, step, self.now, [])
        elif not self.inbox.lobby:
            return self._rest(step.plan, self.now)
        else:
            self._idle = True  # nothing to run: the front end is free and shows all that was sent
        self._without_call += 1
        if self._without_call == MAX_STEPS_WITHOUT_CALL:
            raise Stuck("the policy moves requests in circles and runs nothing", self.server.present(), self.now)
        return None

    def _rest(self, plan: Plan, now: float) -> float:
        """Report what finished, and make sure that something will happen; return when."""
        self._idle, self._without_call = True, 0
        self._report_all(now)
        wakes = [instant for instant in (plan.wake, self.server.next_promotion()) if instant is not None]
        wake = min(wakes, default=math.inf)
        instant = min(self.inbox.next_arrival, wake)
        if instant == math.inf:
            if not self.server.idle():
                raise Stuck("nothing runs, nothing arrives", self.server.present(), now)
            if self.inbox.orphans():
                raise Stuck("they follow requests that do not exist or never ended", self.inbox.orphans(), now)
        elif wake <= now and self.inbox.next_arrival > now:
            raise Stuck(f"the policy asks to be woken at {wake:g} s, which has passed", self.server.present(), now)
        return instant

    def _finish(self, step: Step, now: float) -> None:
        """Record a call that ended now; calls that go on and on without a token are a livelock."""
        server = self.server
        finished = finish_step(server, step, now)
        self.calls += 1
        if not self.plain:
            self.notify_end(step, now, now, finished)
        if server.written != self._written:
            self._written, self._progress = server.written, self.calls
        elif self.calls - self._progress > self._max_calls_without_token:
            why = f"no token in the last {self.calls - self._progress} model calls"
            raise Stuck(why, server.present(), now)

    def _notify_start(self, step: Step, arrived: list[Request], now: float) -> None:
        for rejection in step.plan.moves.reject:
            self._report(rejection.request, now)
        for observer in self.observers:
            observer.begun(self.server, step, arrived)

    def notify_end(self, step: Step, now: float, first: float, finished: list[Request]) -> None:
        """Tell clients and observers what finished; the step, or the first of several, ended at `first`."""
        if self._unreported:
            self._report_all(first)
        if self.end_lag:
            self._unreported.extend(finished)
        else:
            for request in finished:
                self._report(request, now)
        if self.check:
            self.server.check()
        for observer in self.observers:
            observer.ended(self.server, step, now, finished)

    def abort(self, request: Request, now: float, reason: str) -> None:
        """Take out, between two calls, a request whose client has gone; its blocks are freed."""
        plan = Plan(reject=[Rejection(request, reason, "aborted")], memory=self.server.view.memory)
        step = start_step(self.server, plan, now)
        self._notify_start(step, [], now)
        for observer in self.observers:
            observer.ended(self.server, step, now, [])

    @property
    def has_pending_followers(self) -> bool:
        """Whether a client will send its next request once it sees an end that the engine already has."""
        return bool(self._unreported and self.inbox.chained)

    def _report_all(self, now: float) -> None:
        unreported, self._unreported = self._unreported, []
        for request in unreported:
            self._report(request, now)

    def _report(self, request: Request, now: float) -> None:
        request.seen = now
        self.inbox.release(request.id, now)
