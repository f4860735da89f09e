"""The few lines that both clocks run: deliver arrivals, ask the policy, carry out its plan, book the call.

The simulated engine and the live replay differ only in how long a call takes and who says so.
"""

from __future__ import annotations

import math
from typing import Callable, Optional, Protocol

from servesim.core import Plan, Policy, Rejection, Request, Stuck

from .inbox import Inbox
from .server import Server
from .step import Step

TURNS = range(10_000)  # turns without a model call at one instant that mean they would go on forever


class Observer(Protocol):
    """Somebody who is told of every turn, such as a decision log."""

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        """A plan has been carried out."""

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        """Its model call is over, or there was none."""


class Driver:
    """A policy at work on a server, between an inbox and whoever runs the model calls."""

    def __init__(
        self,
        policy: Policy,
        server: Server,
        inbox: Inbox,
        observers: tuple[Observer, ...] = (),
        end_lag: bool = False,
        check: Optional[Callable[[], None]] = None,
    ) -> None:
        self.policy = policy
        self.server = server
        self.inbox = inbox
        self.observers = observers
        server.recording = bool(observers)
        self.end_lag = end_lag  # clients see the end of a stream only when the next call has ended
        self.check = check
        self.calls = 0  # model calls ended
        self.wake: Optional[float] = None
        self._idle = True  # no call was in flight before this turn
        self._leaving: list[Request] = []  # over, not yet seen by their clients
        self._progress = 0  # the last call that wrote a token
        self._written = 0
        self._patience = 1000 + server.pool.total * server.pool.size
        self._patient = policy.max_wait is None
        # nobody watches, and a client sees the end of its stream at once and sends nothing after it
        self.plain = not (observers or check or end_lag or inbox.chained)

    def begin(self, now: float) -> Optional[Step]:
        """Return the next model call, or None when there is nothing to run before `next_event`."""
        server, inbox = self.server, self.inbox
        view = server.view
        for _ in TURNS:
            arrived = self._deliver(now) if inbox.next_arrival <= now or inbox.lobby else []
            if not self._patient:
                server.promote(now)
            view.now, memory = now, view.memory
            plan = self.policy.decide(view)
            step = server.begin(plan, now)
            if step.moved or self.observers:
                self._tell(step, arrived, now)
            if step.decoders or step.chunks or step.calls:
                self._idle = False
                return step
            if step.moved or plan.memory != memory:
                for observer in self.observers:
                    observer.ended(server, step, now, [])
            elif not inbox.lobby:
                self._rest(plan, now)
                return None
            else:
                self._idle = True  # nothing to run: the front end is free and shows all that was sent
        raise Stuck("the policy moves requests in circles and runs nothing", server.present(), now)

    def _tell(self, step: Step, arrived: list[Request], now: float) -> None:
        for rejection in step.plan.reject:
            self._depart(rejection.request, now)
        for observer in self.observers:
            observer.begun(self.server, step, arrived)

    def _deliver(self, now: float) -> list[Request]:
        inbox, submit = self.inbox, self.server.submit
        arrived = inbox.due(now, self.calls, self._idle)
        for request in arrived:  # a front end that lags is what it waited for; otherwise it has queued all along
            submit(request, now, request.arrival + inbox.seconds if inbox.lag == 1 else now)
            if request.place == "done":
                self._depart(request, now)
        return arrived

    def end(self, step: Step, now: float) -> list[Request]:
        """Book a call that ended now; return who is over. Calls that go on and on without a token are a livelock."""
        over = self.server.end(step, now)
        self.calls += 1
        if not self.plain:
            self.show(step, now, now, over)
        if self.server.written != self._written:
            self._written, self._progress = self.server.written, self.calls
        elif self.calls - self._progress > self._patience:
            why = f"no token in the last {self.calls - self._progress} model calls"
            raise Stuck(why, self.server.present(), now)
        return over

    def show(self, step: Step, now: float, first: float, over: list[Request]) -> None:
        """Let clients and watchers see what is over; the step, or the first of several, ended at `first`."""
        if self._leaving:
            self._depart_all(first)
        if self.end_lag:
            self._leaving.extend(over)
        else:
            for request in over:
                self._depart(request, now)
        if self.check is not None:
            self.check()
        for observer in self.observers:
            observer.ended(self.server, step, now, over)

    def abort(self, request: Request, now: float, reason: str) -> None:
        """Take out, between two calls, a request whose client is gone; its memory comes back."""
        plan = Plan(reject=[Rejection(request, reason, "aborted")], memory=self.server.view.memory)
        step = self.server.begin(plan, now)
        self._tell(step, [], now)
        for observer in self.observers:
            observer.ended(self.server, step, now, [])

    @property
    def settling(self) -> bool:
        """Whether a client will send its next request once it sees an end that the engine has behind it."""
        return bool(self._leaving and self.inbox.chained)

    def next_event(self) -> Optional[float]:
        """Return when to ask again after `begin` gave nothing: None when all is done."""
        instant = min(self.inbox.next_arrival, math.inf if self.wake is None else self.wake)
        return None if instant == math.inf else instant

    def _rest(self, plan: Plan, now: float) -> None:
        """Nothing runs: let the clients see what is over, and make sure that something will happen."""
        self._idle = True
        self._depart_all(now)
        wakes = [instant for instant in (plan.wake, self.server.next_promotion()) if instant is not None]
        self.wake = min(wakes, default=None)
        if self.next_event() is None:
            if not self.server.idle():
                raise Stuck("nothing runs, nothing arrives", self.server.present(), now)
            if self.inbox.orphans():
                raise Stuck("they follow requests that do not exist or never ended", self.inbox.orphans(), now)
        elif self.wake is not None and self.wake <= now and self.inbox.next_arrival > now:
            raise Stuck(f"the policy asks to be woken at {self.wake:g} s, which has passed", self.server.present(), now)

    def _depart_all(self, now: float) -> None:
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self._depart(request, now)

    def _depart(self, request: Request, now: float) -> None:
        request.seen = now
        self.inbox.release(request.id, now)
