"""Who hears of the steps of a server: observers, such as the decision log, and clients, who see ends of requests."""

from __future__ import annotations

from typing import Optional, Protocol

from servesim.core import Request

from .inbox import Inbox
from .server import Server
from .step import Step


class Observer(Protocol):
    """Receives a call at the start and at the end of every step, for example the decision log."""

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        """A plan has been carried out. Its model call has not started."""

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        """The model call has ended, or the step had none."""


class Notices:
    """What the observers and the clients of one server hear."""

    __slots__ = ("_behind", "_inbox", "_server", "checks", "observers", "unreported")

    def __init__(self, server: Server, inbox: Inbox, observers: tuple[Observer, ...], check: bool) -> None:
        self._server, self._inbox = server, inbox
        self.observers = observers
        self.checks = check  # verify the counts of the server after every step
        self.unreported: list[Request] = []  # finished; their clients have not seen the end
        # Steps without a call, each behind the step in flight whose end observers see before its own, and their ends;
        # None: that of the step in flight.
        self._behind: list[tuple[Step, Step, Optional[float]]] = []

    @property
    def is_needed(self) -> bool:
        """Whether an observer or a client waits for the end of a step."""
        return bool(self.observers or self.checks or self._inbox.end_lag or self._inbox.clients.followers)

    def start(self, step: Step, arrived: list[Request], now: float) -> None:
        """Tell of a step that starts."""
        for rejection in step.plan.moves.reject:
            self.tell_client(rejection.request, now)
        for observer in self.observers:
            observer.on_step_start(self._server, step, arrived)

    def end(self, step: Step, now: float, finished: list[Request]) -> None:
        """Tell of a step that returns, and of the requests that it finishes."""
        if self.unreported:
            self.tell_clients(now)
        if self._inbox.end_lag:
            self.unreported.extend(finished)
        else:
            for request in finished:
                self.tell_client(request, now)
        if self.checks:
            self._server.check()
        for observer in self.observers:
            observer.on_step_end(self._server, step, now, finished)

    def end_without_call(self, step: Step, now: float) -> None:
        """Tell of the end of a step that did not run the model."""
        for observer in self.observers:
            observer.on_step_end(self._server, step, now, [])

    def end_behind(self, flight: Step, step: Step, now: Optional[float]) -> None:
        """Tell of the end of such a step after that of a step in flight."""
        if self.observers:
            self._behind.append((flight, step, now))

    def returned(self, flight: Step, now: float) -> None:
        """Tell of the steps behind one that has returned."""
        if self._behind:
            behind, self._behind = self._behind, [entry for entry in self._behind if entry[0] is not flight]
            for before, step, end in behind:
                if before is flight:
                    self.end_without_call(step, now if end is None else end)

    def abort(self, step: Step, now: float) -> None:
        """Tell of a step that only aborts requests."""
        for observer in self.observers:
            observer.on_step_start(self._server, step, [])
        if self._server.flight is None:
            self.end_without_call(step, now)
        else:
            self.end_behind(self._server.flight, step, step.decided)

    def tell_client(self, request: Request, now: float) -> None:
        """Let a client see the end of its request."""
        request.client_end = now
        self._inbox.clients.ended(request, now)

    def tell_clients(self, now: float) -> None:
        """Let all clients see the ends of their requests."""
        unreported, self.unreported = self.unreported, []
        for request in unreported:
            self.tell_client(request, now)
