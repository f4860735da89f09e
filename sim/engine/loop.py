"""One server: decide, launch, deliver; repeat the plan while it holds.

A loop has two times: when the oldest step in flight returns, and when the next step is decided. `run_until` does all
that is due before a time; a step that returns at this time is due, too, but no step is decided. Who looks at a server,
or sends to it, first lets it run up to now: run_until(a); run_until(b) is the same as run_until(b).

Simulated and live runs use this loop. They differ in the clock, which gives the end of a call; a live run has a device.
"""

from __future__ import annotations

from typing import Any, Callable, Final, Optional

from servesim.core import DECIDE, IDLE_PLAN, BadInput, Plan, PlanError, Rejection, Request, Stuck, View

from .arrivals import Arrivals
from .clocks import Clock
from .device import Device
from .inbox import Inbox
from .model_call import deliver, launch, set_start
from .notices import Notices, Observer
from .plans import may_decode, may_repeat, repeat_step, start_step
from .server import Server
from .step import NO_REQUESTS, Step
from .stuck import Progress, stuck

INF: Final = float("inf")  # compiled, faster than math.inf
MAX_STEPS_WITHOUT_CALL: Final = 10_000  # at one time; more raise Stuck


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
        self.notices = Notices(server, inbox, observers, check)
        self.device = device  # None in a simulation
        self._polls, self.empty_step = server.rules.polls, server.rules.empty_step
        if self._polls and not self.empty_step:
            raise BadInput("engine.empty_step: expected more than 0 for an engine that polls, got 0")
        self.now = 0.0  # time of the last return or decision
        self.returns_at = INF  # when the oldest step in flight returns
        # a device says when a step returns: the loop asks it when it has to wait
        self._knows_returns = device is None or self._polls
        self.decides_at = 0.0  # when the next step is decided; inf: when a step returns or a request comes
        self.idle_s = 0.0  # seconds without a model call
        self.last_call = 0.0  # when the last model call ended
        self.expects = False  # more requests may come
        self.sleeps = False  # the next decision is at the next arrival, if that is before `decides_at`
        self._rests_until = 0.0  # but not before this time
        self.arrivals = Arrivals(server, inbox, self.notices)
        self.calls = 0  # model calls that have ended
        self._plan = IDLE_PLAN  # the newest one
        self._repeats = 0  # further steps for which it holds
        self._rows = 0  # that decoded in the newest step
        self._newest: Optional[Step] = None  # that ran the model
        self._idle = True  # no model call has run since the last wait
        self._steps_without_call = 0  # steps since the last call or wait
        self._progress = Progress(server)
        self._no_max_wait = self.policy.max_wait is None
        self._depth = server.rules.steps_in_flight
        server.record_moves = bool(observers)
        self.notifies = self.notices.is_needed
        server.cohort.tracks_longest = clock.reads_longest

    # What happens next

    @property
    def next_time(self) -> float:
        """When the next thing happens; inf: when a request comes."""
        return self.returns_at if self.returns_at < self.decides_at else self.decides_at

    def run(self, stop: Optional[Callable[[], bool]] = None) -> float:
        """Run until all requests are done or `stop` returns true. Return the time."""
        self.clock.run_loop(self, stop)
        return self.now

    @property
    def returns_first(self) -> bool:
        """Whether the next thing is the return of a step, and not a decision."""
        return self.returns_at < self.decides_at or (self._polls and self.returns_at == self.decides_at < INF)

    def is_due(self, until: float) -> bool:
        """Whether it delivers up to a time, or decides before it."""
        return self.returns_at <= until if self.returns_first else self.decides_at < until

    @property
    def is_due_now(self) -> bool:
        """Whether a live run has something to do now."""
        return self.returns_first or self.decides_at <= self.now

    def run_until(self, until: float) -> None:
        """Decide before a time, and deliver up to it."""
        while self.is_due(until):
            self.advance()

    def advance(self) -> None:
        """Do the next thing: deliver the oldest step in flight, or decide and launch the next one."""
        if self.returns_first:
            self.receive()
        else:
            self.step(self.decides_at)

    def wake(self) -> None:
        """Decide as soon as the next request arrives, if the server has nothing to do."""
        if self.sleeps and self.inbox.next_arrival < self.decides_at:
            self.decides_at = max(self._rests_until, self.inbox.next_arrival)

    def wake_at(self, now: float) -> None:
        """Decide now, unless a step must return first."""
        if self.decides_at < INF or self.server.flight is None:
            self.decides_at = min(self.decides_at, max(now, self.now))

    def send(self, request: Request) -> None:
        """Add a request of a client or of a router. All that happens before now has happened."""
        self.inbox.send(request)
        self.wake()

    @property
    def is_coupled(self) -> bool:
        """Whether what it does may bring an event: a request follows the end of another one."""
        return bool(self.inbox.clients.followers)

    def expect(self, more: bool) -> None:
        """Note whether requests may come."""
        self.expects = more

    # Decide

    def step(self, now: float) -> None:
        """Repeat the newest plan or decide a new one, and launch its model call."""
        server, state = self.server, self.server.view.state
        if now < self.now:  # a live run is late
            now = self.now
        elif now > self.now:
            if server.flight is None:
                self.idle_s += now - self.now
            self.now = now
        self.sleeps = False
        if self._repeats and self._holds(now):
            step = self._repeat(now)
        else:
            step = self.start(now)
            if not (step.decode_rows or step.chunks or step.runs_model):
                self._go_on_without_call(step, state)
                return
        if self.device is not None:
            self.device.compute(step)
        if self._depth == 1:
            end = self.clock.finish_call(step, step.start, server.rules)
        else:
            end = self.clock.start_call(step, step.start, server.rules)
            if server.pipeline is not None:
                end = server.pipeline.run(step.start, end - step.start)
        self.launch(step, end)

    def _holds(self, now: float) -> bool:
        """Whether the newest plan holds for one more step: nothing has happened that its promise excludes."""
        server, hold = self.server, self._plan.hold
        rows = server.cohort.size
        if not rows or server.finished or self.arrivals.are_due(now):
            return False
        if rows != self._rows and (not hold.past_finish or server.waiting):
            return False
        if hold.until is not None and hold.until <= now:
            return False
        if not self._no_max_wait:
            promotion = server.next_promotion()
            if promotion is not None and promotion <= now:
                return False
        port = self.arrivals.port
        if port is not None and port.is_waiting:  # every decision may start a copy
            return False
        if not may_decode(server, hold.keep_free):
            return False
        state = server.policy.held_state(server.view.state, now)
        if state is DECIDE:
            return False
        server.view.state = state
        return True

    def _repeat(self, now: float) -> Step:
        """Return one more step of the plan that holds."""
        server = self.server
        step = repeat_step(server, self._plan, now)
        self._repeats -= 1
        self._rows = step.decode_rows
        server.waits.go_on(server, now)
        if self.notices.observers:
            self.notices.start(step, NO_REQUESTS, now)
        return step

    def start(self, now: float) -> Step:
        """Deliver arrivals, call the policy and carry out its plan. Return the step, whose model call can start."""
        server, arrived = self.server, NO_REQUESTS
        if self.arrivals.are_due(now):
            arrived = self.arrivals.receive(now, self.calls, self._idle)
        if self.arrivals.port is not None:
            self.arrivals.port.advance(now)
        if not self._no_max_wait:
            server.promote(now)
        view = server.view
        view.now = now
        plan = self._decide(view)
        if not isinstance(plan, Plan):
            raise PlanError(plan)
        step = start_step(server, plan, now)
        self._plan, self._rows = plan, step.decode_rows
        self._repeats = plan.hold.steps if self.clock.hold and may_repeat(server, plan) else 0
        server.waits.note(server, step, now)
        if step.has_moves or self.notices.observers:
            self.notices.start(step, arrived, now)
        return step

    # Launch

    def launch(self, step: Step, end: float) -> None:
        """Launch a model call, which returns at `end`. Wait until another step may be decided."""
        server = self.server
        self._idle, self._steps_without_call = False, 0
        launch(server, step, end)
        self._newest = step
        if self._depth == 1 or (step.before is not None and self._is_full(step)):
            self._wait()
        else:
            if self._knows_returns and step.before is None:
                self.returns_at = end
            self.decides_at = self.now
            server.rules.before_decision(server, step)

    def _wait(self) -> None:
        """Decide nothing until the oldest step in flight returns."""
        step = self.server.flight
        assert step is not None
        while step.before is not None:
            step = step.before
        self.returns_at, self.decides_at = step.end, INF

    def _is_full(self, step: Step) -> bool:
        """Whether the engine has as many steps in flight as it may have; `step` is the newest."""
        places = 1 + step.empty
        while step.before is not None:
            step = step.before
            places += 1 + step.empty
        return places >= self._depth

    def _go_on_without_call(self, step: Step, state: Any) -> None:
        """Set the time of the decision after a step without a model call."""
        server = self.server
        if server.flight is None:
            time = self.next_decision(step, state)
            self.decides_at = self.now if time is None else time
        elif self._polls:
            self._poll(step)
        else:
            self._keep_place(step, server.flight, state)

    def _keep_place(self, step: Step, newest: Step, state: Any) -> None:
        """Let a step without a model call keep its place among the steps in flight."""
        newest.empty += 1
        waits = self.server.idle() or self._is_full(newest)
        self.decides_at = self.now
        if waits:
            self._wait()
        if self.server.pipeline is not None:
            if step.has_moves:
                self.notices.end_behind(newest, step, step.decided)
        elif step.has_moves or step.plan.state != state:
            if waits:
                self.notices.end_behind(newest, step, None)
            else:
                self.notices.end_without_call(step, self.now)

    def _poll(self, step: Step) -> None:
        """Decide again after a pause, while a step is in flight."""
        server = self.server
        assert server.flight is not None
        self.decides_at = self.now + self.empty_step
        if server.idle():
            self.sleeps, self._rests_until, self.decides_at = True, self.decides_at, INF
            self.wake()
        if step.has_moves or not server.idle():
            self.notices.end_behind(server.flight, step, step.decided)

    def next_decision(self, step: Step, state: Any) -> Optional[float]:
        """Return the time of the decision after a step without a call. None: now, a request moved or the state changed.

        inf: there is no event any more.
        """
        server = self.server
        moved, more = step.has_moves or step.plan.state != state, self.expects or self.inbox.next_arrival < INF
        is_idle = server.idle()
        polls = self._polls and (not is_idle or (step.has_moves and more))
        if polls or step.has_moves or (moved and server.pipeline is None):  # stages change the state every time
            self.notices.end_without_call(step, self.now)
        elif not moved and not self.inbox.delayed:
            return self._go_idle(step.plan, self.now)
        if polls or not moved:
            self._idle = True  # no model call blocks the front end, so the scheduler sees all requests
        if polls:
            self.notices.tell_clients(self.now)
        self._steps_without_call += 1
        if self._steps_without_call >= MAX_STEPS_WITHOUT_CALL and not (polls and more):
            steps = f"{MAX_STEPS_WITHOUT_CALL} steps"
            if server.kept:  # in a fleet: it waits for a server that fetches KV
                return self._go_idle(step.plan, self.now)
            if polls:
                raise stuck(server, self.now, f"no progress, {steps} without a model call", "returned no work")
            reason = f"{steps} at the same time without a model call"
            raise stuck(server, self.now, reason, "moved requests or changed its state in each of them")
        takes_time = polls or (self.empty_step and step.has_moves and not is_idle)
        return self.now + self.empty_step if takes_time else None

    def _go_idle(self, plan: Plan, now: float) -> float:
        """Report finished requests and return the time of the next event (inf: none)."""
        self._idle, self.sleeps, self._steps_without_call = True, True, 0
        self._rests_until = now
        self.notices.tell_clients(now)
        server = self.server
        times = [time for time in (plan.hold.until, server.next_promotion()) if time is not None]
        if self.arrivals.times_out:
            times.append(self.inbox.next_timeout())
        wake_at = min(times, default=INF)
        next_event = min(self.inbox.next_arrival, wake_at)
        if wake_at <= now and self.inbox.next_arrival > now:
            raise stuck(
                server,
                self.now,
                f"the plan holds until {wake_at:g} s, which is not later than now",
                "returned this time",
            )
        return max(now, next_event)

    # Deliver

    def receive(self) -> None:
        """Record the results of the oldest step in flight, which returns."""
        server, step = self.server, self.server.flight
        assert step is not None
        newest = step
        next_step: Optional[Step] = None  # the one behind the oldest
        while step.before is not None:
            step, next_step = step.before, step
        if self.device is not None and self._depth > 1:
            self.device.collect(step)
            step.end = self.clock.end_call(step.end)
            if newest is not step:
                set_start(newest, step.end)
        self.now = self.last_call = now = step.end
        self.returns_at = next_step.end if next_step is not None and self._knows_returns else INF
        finished = deliver(server, step, now)
        self._finish(step, now, finished)
        self.notices.returned(step, now)
        if self.decides_at == INF:
            self.decides_at = now
            self.sleeps = False
        assert self._newest is not None
        server.rules.before_decision(server, self._newest)

    def _finish(self, step: Step, now: float, finished: list[Request]) -> None:
        """Report the end of a model call."""
        self.calls += 1
        if finished and not self._plan.hold.past_finish:
            self._repeats = 0
        if self.notifies:
            self.notices.end(step, now, finished)
        self._progress.note_call(self.calls, now)

    def abort(self, request: Request, now: float, reason: str) -> None:
        """Remove a request whose client has disconnected, free its blocks. Call it only between two steps."""
        self._repeats = 0
        self.arrivals.abort([Rejection(request, reason, "aborted")], now)
        self.notices.tell_client(request, now)
        self.wake_at(now)

    # Stuck servers

    def require_idle(self) -> None:
        """Raise Stuck if the server has requests although no event will come."""
        server, port = self.server, self.arrivals.port
        if not server.idle() or (port is not None and port.is_waiting):
            raise stuck(server, self.now, "no request runs and no request will arrive", "returned no work")

    def require_done(self) -> None:
        """Raise Stuck if requests remain although no event will come."""
        self.require_idle()
        if unreleased := self.inbox.clients.unreleased():
            raise Stuck("these requests wait for a request that does not exist or never finished", unreleased, self.now)
