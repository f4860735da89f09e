"""What happens before a decision: requests reach the scheduler, and those whose clients have given up are aborted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from servesim.core import Plan, Rejection, Request

from .inbox import Inbox
from .notices import Notices
from .plans import start_step
from .server import Server
from .step import NO_REQUESTS
from .transfers import Port


class Arrivals:
    """The way from the inbox of one server into its queues, and out of them without an answer."""

    __slots__ = ("_inbox", "_notices", "_server", "port", "times_out")

    def __init__(self, server: Server, inbox: Inbox, notices: Notices) -> None:
        self._server, self._inbox, self._notices = server, inbox, notices
        self.times_out = inbox.timeout is not None
        self.port: Optional[Port] = None  # in a fleet: KV that leaves or enters this server

    def are_due(self, now: float) -> bool:
        """Whether a decision has to look for requests, or for clients that have given up."""
        inbox = self._inbox
        return inbox.next_arrival <= now or bool(inbox.delayed) or (self.times_out and inbox.next_timeout() <= now)

    def receive(self, now: float, calls: int, idle: bool) -> list[Request]:
        """Submit the requests that the scheduler sees now, and abort those whose clients have given up.

        `calls` model calls have ended; `idle`: none blocks the front end. Return the arrivals.
        """
        arrived = self._submit(now, calls, idle)
        while self.times_out and (gone := self._inbox.pop_timed_out(now)):
            assert self._inbox.timeout is not None
            reason = f"the client gave up after {self._inbox.timeout:g} s"
            self.abort([Rejection(request, reason, "lost") for request in gone], now)
            for request in gone:
                self._notices.tell_client(request, request.sent + self._inbox.timeout)
            arrived = [*arrived, *self._submit(now, calls, idle)]  # the next requests of these clients
        return arrived

    def _submit(self, now: float, calls: int, idle: bool) -> list[Request]:
        inbox, server = self._inbox, self._server
        if inbox.next_arrival > now and not inbox.delayed:
            return NO_REQUESTS
        arrived = inbox.pop_visible(now, calls, idle)
        submitted = arrived
        if self.port is not None:
            arrived, submitted = self.port.receive(arrived, now)
        for request in submitted:  # with a lag, the time before is front-end time, not queueing time
            server.submit(request, now, request.arrival + inbox.seconds if inbox.lag == 1 else now)
            if request.status == "done":
                self._notices.tell_client(request, now)
            elif self.times_out:
                inbox.expect_timeout(request)
        return arrived

    def abort(self, rejections: Sequence[Rejection], now: float) -> None:
        """Remove requests from the queues, and free their blocks."""
        step = start_step(self._server, Plan(reject=rejections, state=self._server.view.state), now)
        self._notices.abort(step, now)
