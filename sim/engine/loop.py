"""The engine loop: deliver arrivals, call the policy, carry out its plan, run the model call, record the results.

Simulated and live runs use this loop. They differ in the clock, which gives the end of a call; a live run has a device.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Final, Optional, Protocol

from servesim.core import BadInput, Plan, PlanError, Rejection, Request, Stuck, View

from .clocks import Clock
from .inbox import Inbox
from .model_call import deliver, launch, set_start
from .plans import start_step
from .server import Server
from .step import NO_REQUESTS, Step
from .stuck import describe_cause
from .transfers import Port

MAX_STEPS_WITHOUT_CALL: Final = 10_000  # at one time; more raise Stuck


class Observer(Protocol):
    """Receives a call at the start and at the end of every step, for example the decision log.

    One with `every_step = False` leaves fast-forward on: held steps are then one call at their start and end.
    """

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        """A plan has been carried out. Its model call has not started."""

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        """The model call has ended, or the step had none."""


class Device(Protocol):
    """Runs the model calls of a live run."""

    def compute(self, step: Step) -> None:
        """Run the model call of a step; with two steps in flight, only launch it."""

    def collect(self, step: Step) -> None:
        """Wait for a call in flight."""


class Loop:
    """Runs one server: its policy, its inbox and its clock."""

    def __init__(
        self,
        server: Server,
        inbox: Inbox,
        clock: Clock,
        observers: tuple[Observer, ...] = (),
        check: bool = False,
        device: Optional[Device] = None,
    ) -> None:
        self.policy = server.policy
        self._decide: Callable[[View], object] = server.policy.decide  # a user's policy may return anything
        self.server = server
        self.inbox = inbox
        self.clock = clock
        self.observers = observers
        self.check_every_step = check  # verify the counts of the server after every step
        self.device = device  # None in a simulation
        self._polls, self.empty_step = server.rules.polls, server.rules.empty_step
        if self._polls and not self.empty_step:
            raise BadInput("engine.empty_step: expected more than 0 for an engine that polls, got 0")
        self.now = 0.0
        self.barrier = math.inf  # in a fleet: held steps run up to this time, after which a request may come
        self.held: Optional[Step] = None  # in a fleet: the newest step of a held plan that waits
        self.in_fleet = False
        self.holds = False  # in a fleet: requests that are not known may come before a held plan ends
        self.pauses = False  # in a fleet: a held plan that has reached the barrier waits
        self.expects = False  # in a fleet: the router may send more requests
        self.tells_first_tokens = False  # in a fleet: a choice of the router depends on them
        self.admitted: list[Request] = []  # in a fleet: arrivals of the next decision that are delivered already
        self.sleeps = False  # the next decision is at the next arrival, if that is earlier than the time given
        self.port: Optional[Port] = None  # in a fleet: KV that leaves or enters this server
        self.calls = 0  # model calls that have ended
        self._idle = True  # no model call has run since the last wait
        self._steps_without_call = 0  # steps since the last call or wait
        # steps without a call, each after the step in flight whose end observers see before its own
        self._polled: list[tuple[Step, Step]] = []
        self._unreported: list[Request] = []  # finished; their clients have not seen the end
        self._last_progress = 0  # the last call that generated a token
        self._tokens_generated = 0
        self._max_calls_without_token = 1000 + server.pool.total * server.pool.block_size
        self._no_max_wait = self.policy.max_wait is None
        self._times_out = inbox.timeout is not None
        self._depth = server.rules.steps_in_flight
        server.record_moves = bool(observers)
        # no observer, client or follower waits for the end of a step
        self.fast_path = not (observers or check or inbox.end_lag or inbox.reports_ends)
        server.cohort.tracks_longest = clock.reads_longest
        self.fast_forward = clock.make_fast_forward(self)

    def run(self, stop: Optional[Callable[[], bool]] = None) -> float:
        """Run until all requests are done or `stop` returns true. Return the time."""
        self.clock.run_loop(self, stop)
        return self.now

    def run_until_wait(self) -> float:
        """Run steps until there is nothing to do. Return the time of the next event (inf: all done)."""
        next_event = self.step()
        while next_event is None:
            next_event = self.step()
        return next_event

    def step(self) -> Optional[float]:
        """Run one step, or fast-forward. Return None to continue, else the time of the next event (inf: all done)."""
        server, state = self.server, self.server.view.state
        step = self.start(self.now)
        if not (step.decode_rows or step.chunks or step.runs_model):
            return self._go_on_without_call(step, state)
        if step.hold and self.fast_forward is not None and self._may_fast_forward():
            if self.holds:
                self.held = step
            else:
                self.run_held(step)
            return None
        if self.device is not None:
            self.device.compute(step)
        if self._depth == 1:
            end = self.clock.finish_call(step, step.start, server.rules)
        else:
            end = self.clock.start_call(step, step.start, server.rules)
            if server.pipeline is not None:
                end = server.pipeline.run(step.start, end - step.start)
        self.send(step, end)
        return None

    def run_held(self, step: Step) -> None:
        """Run a decided step of a held plan, and the steps after it."""
        assert self.fast_forward is not None
        self.held = None
        self._idle, self._steps_without_call = False, 0
        self.now = self.fast_forward.run(step)
        self._tokens_generated, self._last_progress = self.server.tokens_generated, self.calls  # every step has a token

    def _may_fast_forward(self) -> bool:
        """Whether held steps can run as one event. With steps in flight, failures and lag need every step."""
        server = self.server
        if self.port is not None and self.port.is_waiting:  # every decision may start a copy
            return False
        return self._depth == 1 or (server.flight is not None and not server.may_fail and self.inbox.lag == 1)

    def start(self, now: float) -> Step:
        """Deliver arrivals, call the policy and carry out its plan. Return the step, whose model call can start."""
        server, arrived = self.server, NO_REQUESTS
        if self.inbox.next_arrival <= now or self.inbox.delayed or self._times_out:
            arrived = self.admit(now)
            self.admitted = []
        if self.port is not None:
            self.port.advance(now)
        if not self._no_max_wait:
            server.promote(now)
        view = server.view
        view.now = now
        plan = self._decide(view)
        if not isinstance(plan, Plan):
            raise PlanError(plan)
        step = start_step(server, plan, now)
        server.waits.note(server, step, now)
        if step.has_moves or self.observers:
            self.notify_start(step, arrived, now)
        return step

    def send(self, step: Step, end: float) -> None:
        """Launch a model call, which returns at `end`. Wait until another step may be decided."""
        server = self.server
        self._idle, self._steps_without_call = False, 0
        launch(server, step, end)
        if self._depth == 1 or (step.before is not None and self._is_full(step)):
            self.receive()
        server.rules.before_decision(server, step)

    def _is_full(self, step: Step) -> bool:
        """Whether the engine has as many steps in flight as it may have; `step` is the newest."""
        places = 1 + step.empty
        while step.before is not None:
            step = step.before
            places += 1 + step.empty
        return places >= self._depth

    def receive(self) -> list[Request]:
        """Wait for the oldest step in flight and record its results. Return the finished requests."""
        server, step = self.server, self.server.flight
        assert step is not None
        newest = step
        while step.before is not None:
            step = step.before
        if self.device is not None and self._depth > 1:
            self.device.collect(step)
            step.end = self.clock.end_call(step.end)
            if newest is not step:
                set_start(newest, step.end)
        self.now = now = step.end
        finished = deliver(server, step, now)
        self._finish(step, now, finished)
        if self._polled:
            polled, self._polled = self._polled, [pair for pair in self._polled if pair[0] is not step]
            for after, before in polled:
                if after is step:
                    self._notify_no_call(before, before.decided)
        return finished

    def admit(self, now: float) -> list[Request]:
        """Deliver arrivals, and abort requests whose clients have given up. Return all arrivals of this decision."""
        arrived = self._deliver(now) if self.inbox.next_arrival <= now or self.inbox.delayed else NO_REQUESTS
        if self._times_out and self.inbox.next_timeout() <= now:
            arrived = self._abort_timed_out(now, arrived)
        if self.admitted:
            arrived = [*self.admitted, *arrived]
        return arrived

    def _deliver(self, now: float) -> list[Request]:
        """Submit the requests that the scheduler sees now."""
        inbox, server = self.inbox, self.server
        arrived = inbox.pop_visible(now, self.calls, self._idle)
        submitted = arrived
        if self.port is not None:
            arrived, submitted = self.port.receive(arrived, now)
        for request in submitted:  # with a lag, the time before is front-end time, not queueing time
            server.submit(request, now, request.arrival + inbox.seconds if inbox.lag == 1 else now)
            if request.status == "done":
                self._report_to_client(request, now)
            elif self._times_out:
                inbox.expect_timeout(request)
        return arrived

    def _abort_timed_out(self, now: float, arrived: list[Request]) -> list[Request]:
        """Abort the requests whose clients have given up, as the engine does before a decision. Return all arrivals."""
        inbox, timeout = self.inbox, self.inbox.timeout
        assert timeout is not None
        while gone := inbox.pop_timed_out(now):
            self._abort(
                [Rejection(request, f"the client gave up after {timeout:g} s", "lost") for request in gone], now
            )
            for request in gone:
                self._report_to_client(request, request.sent + timeout)
            if inbox.next_arrival <= now:  # the next requests of these clients
                arrived = [*arrived, *self._deliver(now)]
        return arrived

    def _go_on_without_call(self, step: Step, state: Any) -> Optional[float]:
        """Return the time of the decision after a step without a model call; None: now, or after the step in flight."""
        server = self.server
        if server.flight is None:
            time = self.next_decision(step, state)
            if time == math.inf:
                self.require_done()
            return time
        if not self._polls:
            newest = server.flight
            newest.empty += 1
            if server.pipeline is not None and step.has_moves:
                self._polled.append((newest, step))
            if server.idle() or self._is_full(newest):
                self.receive()
            if server.pipeline is None and (step.has_moves or step.plan.state != state):
                self._notify_no_call(step, self.now)
            return None
        wake_at = self.now + self.empty_step
        if server.idle():
            wake_at = max(wake_at, min(self.inbox.next_arrival, self.barrier))
        if self.observers and (step.has_moves or not server.idle()):
            self._polled.append((server.flight, step))
        if server.flight.end <= wake_at:
            self.receive()
        if wake_at < math.inf:
            self.now = max(self.now, wake_at)
        return None

    def next_decision(self, step: Step, state: Any) -> Optional[float]:
        """Return the time of the decision after a step without a call. None: now, a request moved or the state changed.

        inf: there is no event any more.
        """
        moved, more = step.has_moves or step.plan.state != state, self.expects or self.inbox.next_arrival < math.inf
        is_idle, self.sleeps = self.server.idle(), False
        polls = self._polls and (not is_idle or (step.has_moves and more))
        if polls or step.has_moves or (moved and self.server.pipeline is None):  # stages change the state every time
            self._notify_no_call(step, self.now)
        elif not moved and not self.inbox.delayed:
            return self._go_idle(step.plan, self.now)
        if polls or not moved:
            self._idle = True  # no model call blocks the front end, so the scheduler sees all requests
        if polls:
            self._report_all(self.now)
        self._steps_without_call += 1
        if self._steps_without_call >= MAX_STEPS_WITHOUT_CALL and not (polls and more):
            steps = f"{MAX_STEPS_WITHOUT_CALL} steps"
            if self.server.kept:  # in a fleet: it waits for a server that fetches KV
                return self._go_idle(step.plan, self.now)
            if polls:
                raise self.stuck(f"no progress, {steps} without a model call", "returned no work")
            reason = f"{steps} at the same time without a model call"
            raise self.stuck(reason, "moved requests or changed its state in each of them")
        takes_time = polls or (self.empty_step and step.has_moves and not is_idle)
        return self.now + self.empty_step if takes_time else None

    def _go_idle(self, plan: Plan, now: float) -> float:
        """Report finished requests and return the time of the next event (inf: none)."""
        self._idle, self.sleeps, self._steps_without_call = True, True, 0
        self._report_all(now)
        times = [time for time in (plan.hold.until, self.server.next_promotion()) if time is not None]
        if self._times_out:
            times.append(self.inbox.next_timeout())
        wake_at = min(times, default=math.inf)
        next_event = min(self.inbox.next_arrival, wake_at)
        if wake_at <= now and self.inbox.next_arrival > now:
            raise self.stuck(f"the plan holds until {wake_at:g} s, which is not later than now", "returned this time")
        return next_event

    def require_done(self) -> None:
        """Raise Stuck if requests remain although no event will come. In a fleet, more requests may come."""
        if self.in_fleet:
            return
        if not self.server.idle() or (self.port is not None and self.port.is_waiting):
            raise self.stuck("no request runs and no request will arrive", "returned no work")
        if unreleased := self.inbox.unreleased():
            raise Stuck("these requests wait for a request that does not exist or never finished", unreleased, self.now)

    def stuck(self, reason: str, action: str) -> Stuck:
        """Return the error of an engine that can never run again; `action` is what the policy did."""
        return Stuck(reason, self.server.all_requests(), self.now, describe_cause(self.server, action))

    def _finish(self, step: Step, now: float, finished: list[Request]) -> None:
        """Report the end of a model call. Raise Stuck after too many calls without a token."""
        server = self.server
        self.calls += step.steps
        if not self.fast_path:
            self.notify_end(step, now, now if step.steps == 1 else step.first_end, finished)
        if server.tokens_generated != self._tokens_generated:
            self._tokens_generated, self._last_progress = server.tokens_generated, self.calls
        elif self.calls - self._last_progress > self._max_calls_without_token:
            reason = f"no token in the last {self.calls - self._last_progress} model calls"
            raise self.stuck(reason, "returned plans that generate none")

    def notify_start(self, step: Step, arrived: list[Request], now: float) -> None:
        for rejection in step.plan.moves.reject:
            self._report_to_client(rejection.request, now)
        for observer in self.observers:
            observer.on_step_start(self.server, step, arrived)

    def _notify_no_call(self, step: Step, now: float) -> None:
        for observer in self.observers:
            observer.on_step_end(self.server, step, now, [])

    def notify_end(self, step: Step, now: float, first: float, finished: list[Request]) -> None:
        """Notify clients and observers. If steps were fast-forwarded, the first of them ended at `first`."""
        if self._unreported:
            self._report_all(first)
        if self.inbox.end_lag:
            self._unreported.extend(finished)
        else:
            for request in finished:
                self._report_to_client(request, now)
        if self.check_every_step:
            self.server.check()
        for observer in self.observers:
            observer.on_step_end(self.server, step, now, finished)

    def abort(self, request: Request, now: float, reason: str) -> None:
        """Remove a request whose client has disconnected, free its blocks. Call it only between two steps."""
        self._abort([Rejection(request, reason, "aborted")], now)
        self._report_to_client(request, now)

    def _abort(self, rejections: list[Rejection], now: float) -> None:
        step = start_step(self.server, Plan(reject=rejections, state=self.server.view.state), now)
        for observer in self.observers:
            observer.on_step_start(self.server, step, [])
        if self.server.flight is None:
            self._notify_no_call(step, now)
        else:
            self._polled.append((self.server.flight, step))

    @property
    def has_pending_followers(self) -> bool:
        """Whether a finished request, whose client has not seen the end yet, may release followers."""
        return bool(self._unreported) and self.inbox.has_followers

    @property
    def has_unreported(self) -> bool:
        """Whether a client has not seen the end of a finished request yet."""
        return bool(self._unreported)

    def _report_all(self, now: float) -> None:
        unreported, self._unreported = self._unreported, []
        for request in unreported:
            self._report_to_client(request, now)

    def _report_to_client(self, request: Request, now: float) -> None:
        request.client_end = now
        self.inbox.end(request, now)
