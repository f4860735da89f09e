"""Replicas that come and go: faults, restarts, and a rule that adds and removes replicas.

A fault is an interrupt of the process of its replica. A replica that crashes loses its KV cache and all of its
requests, and returns empty. The router sees which replicas are there only after `detect` seconds; a request that it
sends to a replica that is gone fails at once. With `retry`, a request without a token is sent again; a client that has
got a part of its answer gets an error. A request that no replica can take waits at the router.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Callable, Final, Optional

import simpy
from servesim.core import Request, StepCost
from servesim.core.request import reset_request
from servesim.routers.router import Router

from .changes import Changes, Fault, Scaling
from .fleet import LAST, NO_REPLICA, Ask, Fleet
from .loop import Loop
from .replica import Replica

START: Final = "start"  # cause of an interrupt


class ChangingFleet(Fleet):
    """A fleet whose replicas come and go.

    `rebuild` returns a new loop for a replica, `slow_down` a cost model with the times of another one, multiplied.
    """

    def __init__(
        self, replicas: Sequence[Replica], router: Router, requests: Sequence[Request], ask: Ask, seed: int,
        staleness: float, rebuild: Callable[[int], Loop], slow_down: Callable[[StepCost, float], StepCost],
        changes: Changes,
    ) -> None:  # fmt: skip
        super().__init__(replicas, router, requests, ask, seed, staleness, changes=True)
        self._requests = requests
        self._rebuild = rebuild
        self._slow_down = slow_down
        self._changes = changes
        self._times = [fault.at for fault in changes.faults]  # heap of the times of changes
        heapify(self._times)
        self._tick = math.inf if changes.scaling is None else changes.scaling.interval  # next decision of the rule
        self._alive = set(range(len(replicas) if changes.scaling is None else changes.scaling.min))
        self._draining: set[int] = set()  # these get no more requests
        self._drained_at: dict[int, float] = {}  # when it began
        self._returning: set[int] = set()  # these are gone, and come back by themselves
        self._outside: list[Request] = []  # requests that no replica can take
        self._paid_since = dict.fromkeys(self._alive, 0.0)
        self.replica_seconds = 0.0  # from the order of a replica to its removal, or to the last answer
        self.retried = 0
        self.present = sorted(self._alive)
        for fault in changes.faults:
            self._env.process(self._run_fault(fault))
        if changes.scaling is not None:
            self._env.process(self._run_scaling(changes.scaling))

    def run(self) -> float:
        """Run until all requests are done or lost. Return the time."""
        super().run()
        end = max([request.finish for request in self._requests if request.finish is not None], default=0.0)
        self.replica_seconds += sum([max(0.0, end - since) for since in self._paid_since.values()])
        return self.now

    def metrics(self) -> dict[str, Any]:
        return {"replica_seconds": self.replica_seconds, "retried": self.retried}

    # Faults

    def _run_fault(self, fault: Fault) -> Generator[simpy.Event, Any, None]:
        yield from self._sleep(fault.at)
        heappop(self._times)
        if fault.kind != "slow":
            self._replica_processes[fault.replica].interrupt(fault)
            return
        clock: Any = self.replicas[fault.replica].loop.clock
        cost: StepCost = clock.cost
        self._change_cost(fault.replica, self._slow_down(cost, fault.factor))
        if fault.recover is not None:
            heappush(self._times, fault.at + fault.recover)
            yield from self._sleep(fault.at + fault.recover)
            heappop(self._times)
            self._change_cost(fault.replica, cost)

    def _change_cost(self, number: int, cost: StepCost) -> None:
        """Use other step times of a replica from now on."""
        replica = self.replicas[number]
        replica.run_held(self._env.now)
        clock: Any = replica.loop.clock
        clock.change_cost(cost)
        self._replica_processes[number].interrupt()

    def _run_replica(self, number: int) -> Generator[simpy.Event, Any, None]:
        replica = self.replicas[number]
        if number not in self._alive:
            yield from self._stay_away(number, math.inf)
        pause: Optional[float] = None  # of a replica that drains
        while True:
            time = self._run_steps(number)
            is_drained = number in self._draining and replica.is_empty
            emptied = self._emptied(number) if is_drained else math.inf
            cause = yield from self._sleep(emptied if is_drained else time, LAST + number)
            if isinstance(cause, Fault) and cause.kind == "crash":
                self._crash(number)
                yield from self._stay_away(number, math.inf if cause.recover is None else self._env.now + cause.recover)
            elif isinstance(cause, Fault):
                pause = cause.recover
                self._drain(number)
            elif is_drained and replica.is_empty and emptied <= self._env.now:
                if pause is None:
                    self.replica_seconds += max(0.0, emptied - self._paid_since.pop(number, emptied))
                self._leave(number)
                yield from self._stay_away(number, math.inf if pause is None else emptied + pause)
                pause = None

    def _stay_away(self, number: int, until: float) -> Generator[simpy.Event, Any, None]:
        """Wait until a replica comes back, by itself or because the rule starts it; then start it without requests."""
        if until < math.inf:
            self._returning.add(number)
        while self._env.now < until:
            cause = yield from self._sleep(until)
            if cause == START and self._changes.scaling is not None:
                until = self._env.now + self._changes.scaling.start_up
        loop = self._rebuild(number)
        self.loops.append(loop)
        self.share_totals(loop)
        self._attach(loop)
        self.replicas[number].replace(loop, self._env.now)
        self._returning.discard(number)
        self._alive.add(number)
        self._notice(self._changes.detect)

    def _emptied(self, number: int) -> float:
        """Return when a replica that drains had no request any more."""
        ends = [r.finish for r in self._requests if r.finish is not None and self.replica_of.get(r.id) == number]
        return max([self._drained_at[number], *ends])

    def _drain(self, number: int) -> None:
        self._drained_at[number] = self._env.now
        self._draining.add(number)
        self._notice(0.0)

    def _leave(self, number: int) -> None:
        self._alive.discard(number)
        self._draining.discard(number)

    def _crash(self, number: int) -> None:
        """Take all requests from a replica; send them again, or lose them."""
        now, replica = self._env.now, self.replicas[number]
        replica.run_held(now)
        requests = self._take_requests(number, replica.loop, now)
        self._leave(number)
        self._notice(self._changes.detect)
        self._tell_router(now)
        for request in requests:
            if request.first_token is not None and request.first_token <= now:
                self._lose(request, now, "its replica crashed while it answered")
            elif not self._changes.retry:
                self._lose(request, now, "its replica crashed")
            else:
                self._send_again(request, now)
        self._wake_router()

    def _take_requests(self, number: int, loop: Loop, now: float) -> list[Request]:
        """Take the requests that are not done now. The results of the step that runs now are lost."""
        undone = [request for time, request in self._ended if time > now and self.replica_of[request.id] == number]
        for request in undone:
            self.arrivals.take_back_end(request)
        running = [request for request in loop.server.all_requests() if request.status != "done"]
        for request in running:
            loop.abort(request, now, "its replica crashed")
        taken = [*running, *undone, *loop._unreported, *loop.inbox.take_all()]
        ids = {request.id for request in taken}
        self._ended[:] = [end for end in self._ended if end[1].id not in ids]
        self._ended.extend([(now, request) for request in taken])
        return taken

    def _send_again(self, request: Request, now: float) -> None:
        """Bring a request to the router again, as it was sent."""
        reset_request(request)
        request.arrival = request.visible_at = request.received = request.state_since = now
        self.arrivals.send_again(request, now)
        self.retried += 1

    def _lose(self, request: Request, now: float, reason: str) -> None:
        """End a request without an answer."""
        request.status, request.outcome, request.reason = "done", "lost", reason
        request.finish = request.client_end = now
        if request.first_token is not None and request.first_token > now:
            request.first_token = None
        self.arrivals.end(request, now)

    # What the router sees

    def _notice(self, delay: float) -> None:
        """Let the router see which replicas are there, after some seconds."""
        if delay:
            self._env.process(self._notice_later(delay))
            return
        self.present = sorted(self._alive - self._draining)
        if self.present and self._outside:
            now, waiting = self._env.now, self._outside
            self._outside = []
            for request in waiting:
                request.arrival = request.visible_at = request.state_since = now
                self.arrivals.send_again(request, now)
            self._wake_router()

    def _notice_later(self, delay: float) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(delay)
        self._notice(0.0)

    def _route(self, request: Request) -> int:
        if self.present:
            number = self._choose(False, request)
            if number in self._alive:
                return number
            self.router.ended(self.memory, *self._asked.pop(request.id))
            self._without_token.pop(request.id, None)
            if not self._changes.retry:
                self._lose(request, self._env.now, "its replica was gone")
                return NO_REPLICA
            self.retried += 1
            alive = [number for number in self.present if number in self._alive]
            if alive:
                return self._choose(False, request, alive)
        self._outside.append(request)
        return NO_REPLICA

    def _wake(self, number: int) -> None:
        if number in self._alive:
            super()._wake(number)

    def _horizon(self, number: int) -> float:
        change = min(self._times[0], self._tick) if self._times else self._tick
        return min(super()._horizon(number), change)

    def _finish(self) -> None:
        """Lose the requests that no replica could take, and those that follow them."""
        while self._outside or self.arrivals.next_arrival < math.inf:
            request = self._outside.pop() if self._outside else self.arrivals.pop()
            self._lose(request, max(request.sent, self.now), "no replica was left")
        for number in self._alive:
            self.replicas[number].finish()

    # The rule that adds and removes replicas

    def _run_scaling(self, scaling: Scaling) -> Generator[simpy.Event, Any, None]:
        while self._has_work():
            yield from self._sleep(self._tick)
            self._scale(scaling)
            self._tick = self._next_tick(scaling)
        self._tick = math.inf

    def _next_tick(self, scaling: Scaling) -> float:
        """Return the time of the next decision. Until a request comes, a fleet without work stays as it is."""
        now, arrival = self._env.now, self.arrivals.next_arrival
        rests = len(self._alive) == scaling.min and not (self._outside or self._returning or self._draining)
        if rests and now < arrival < math.inf and all(self.replicas[number].is_empty for number in self._alive):
            return now + scaling.interval * max(1, math.ceil((arrival - now) / scaling.interval))
        return now + scaling.interval

    def _has_work(self) -> bool:
        """Whether requests will come, or are there and can be served."""
        if self.arrivals.next_arrival < math.inf or any(not self.replicas[number].is_empty for number in self._alive):
            return True
        return bool(self._outside)

    def _scale(self, scaling: Scaling) -> None:
        """Order a replica, or let one drain."""
        serving = sorted(self._alive - self._draining)
        stopped = [n for n in range(len(self.replicas)) if n not in self._alive and n not in self._returning]
        waiting = len(self._outside)
        for number in serving:
            loop = self.replicas[number].loop
            waiting += len(loop.server.waiting) + len(loop.inbox)
        if waiting > scaling.target_queue * len(serving):
            if stopped and not self._returning and len(serving) < scaling.max:
                self._returning.add(stopped[0])
                self._paid_since.setdefault(stopped[0], self._env.now)
                self._replica_processes[stopped[0]].interrupt(START)
        elif not waiting and len(serving) > scaling.min and not self._returning:
            self._drain(serving[-1])
            self._replica_processes[serving[-1]].interrupt()
