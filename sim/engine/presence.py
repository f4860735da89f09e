"""Replicas that come and go: faults, restarts, and rules that add and remove replicas.

A replica that crashes loses its KV cache and all of its requests, and returns empty. The router sees which replicas are
there only after `detect` seconds; a request that it sends to a replica that is gone fails at once. With `retry`, a
request without a token is sent again; a client that has got a part of its answer gets an error. A request that no
replica can take waits at the router.

With prefill and decode apart, a prefill replica that crashes loses the KV that is not copied: a decode replica computes
these prompts, or lets the requests fail, as after a time-out. If a decode replica crashes, the blocks on the prefill
side stay until the time-out. A replica that drains stays until its KV is copied.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, Callable, Optional

import simpy
from servesim.core import Rejection, Request, StepCost
from servesim.core.request import reset_request

from .changes import Changes, Fault, Scaling
from .fleet import NO_REPLICA, Fleet
from .loop import Loop
from .model_call import count_cut_step
from .step import Step
from .world import LAST, LATER

Rebuild = Callable[[int], Loop]  # returns a new loop of a replica
SlowDown = Callable[[StepCost, float], StepCost]  # returns a cost model with other times, multiplied


class Presence:
    """Which replicas of a fleet are there."""

    def __init__(
        self, fleet: Fleet, changes: Changes, rebuild: Rebuild, slow_down: SlowDown, requests: Sequence[Request]
    ) -> None:
        self._fleet, self._world = fleet, fleet.world
        fleet.presence, fleet.is_coupled = self, True
        self._requests, self._changes = requests, changes
        self._rebuild, self._slow_down = rebuild, slow_down
        numbers = range(len(fleet.replicas))
        self.alive = set(numbers).difference(*[rule.replicas[rule.min :] for rule in changes.scaling])
        # Replicas that get no more requests, and for how many seconds they are then away; None: for ever.
        self._draining: dict[int, Optional[float]] = {}
        self._returning: set[int] = set()  # these are gone, and come back by themselves
        self._outside: list[tuple[bool, Request]] = []  # requests that no replica (for a decode?) can take
        self._slow: list[list[Fault]] = [[] for _ in numbers]  # by replica: faults that make it slow now
        self._usual_cost: dict[int, StepCost] = {}  # of these replicas
        self._there_since = dict.fromkeys(self.alive, 0.0)  # time of the order of each replica
        self._removed: list[tuple[int, float, float]] = []  # replicas, times of their order and of their end
        self._retried = 0
        self._set_present()
        for number in set(numbers) - self.alive:
            fleet.replicas[number].loop.decides_at = math.inf
        for fault in changes.faults:
            self._world.process(self._run_fault(fault))
        if changes.scaling:
            self._world.process(self._run_scaling())

    def metrics(self) -> dict[str, Any]:
        return {"replica_seconds": sum(self.seconds_there()), "retried": self._retried}

    def last_end(self) -> float:
        """Return when the last client saw the end of its request."""
        return max([request.client_end for request in self._requests if request.client_end is not None], default=0.0)

    def seconds_there(self) -> list[float]:
        """Return the seconds of each replica from its order to its removal, between the first request and last end."""
        first, last = min([request.sent for request in self._requests], default=0.0), self.last_end()
        seconds = [0.0] * len(self._fleet.replicas)
        there = [(number, since, last) for number, since in self._there_since.items()]
        for number, since, until in [*self._removed, *there]:
            seconds[number] += max(0.0, min(until, last) - max(since, first))
        return seconds

    # Faults

    def _run_fault(self, fault: Fault) -> Generator[simpy.Event, Any, None]:
        yield self._world.at(fault.at)
        number = fault.replica
        if number not in self.alive:
            return
        if fault.kind == "crash":
            self._crash(number)
            self._leave(number, self._world.now, fault.recover)
        elif fault.kind == "restart":
            self._drain(number, fault.recover)
        else:
            slow = self._slow[number]
            slow.append(fault)
            self._change_cost(number)
            if fault.recover is not None:
                yield self._world.at(fault.at + fault.recover)
                if fault in slow:  # a new server is not slow
                    slow.remove(fault)
                    self._change_cost(number)

    def _change_cost(self, number: int) -> None:
        """Use the step times of a replica that some faults make slow, from now on."""
        clock: Any = self._fleet.replicas[number].loop.clock
        cost = self._usual_cost.setdefault(number, clock.cost)
        for fault in self._slow[number]:
            cost = self._slow_down(cost, fault.factor)
        clock.change_cost(cost)

    def _crash(self, number: int) -> None:
        """Take all requests from a replica; send them again, or lose them."""
        fleet, now = self._fleet, self._world.now
        requests = self._take_requests(number, now)
        self.alive.discard(number)
        self._draining.pop(number, None)
        if number in fleet.decode_replicas:
            self._free_decodes(number, requests)
        elif fleet.transfers is not None:
            requests = self._lose_prefills(number, now)
        for request in requests:
            if request.first_token is not None:
                self._lose(request, now, "its replica crashed while it answered")
            elif not self._changes.retry:
                self._lose(request, now, "its replica crashed")
            else:
                self._send_again(request, now)

    def _take_requests(self, number: int, now: float) -> list[Request]:
        """Take the requests of a replica that crashes. The results of the step that runs now are lost."""
        loop = self._fleet.replicas[number].loop
        running = end_requests(loop, now, "its replica crashed")
        waiting = [] if loop.arrivals.port is None else loop.arrivals.port.take_all()
        return list(dict.fromkeys([*running, *waiting, *loop.inbox.take_all()]))

    def _free_decodes(self, number: int, taken: Sequence[Request]) -> None:
        """Let the requests that would have come to a decode replica go to another one after their prefill."""
        transfers = self._fleet.transfers
        assert transfers is not None
        for move in transfers.moves.values():
            if move.decode == number and move.request not in taken:
                move.decode = NO_REPLICA
                self._fleet.forget_choice(move.request)

    def _lose_prefills(self, number: int, now: float) -> list[Request]:
        """Lose the KV of a prefill replica. Return the requests whose prefill had not ended."""
        transfers = self._fleet.transfers
        assert transfers is not None
        moves = transfers.lose_prefills(number, now, now + self._changes.detect)
        for move in moves if transfers.settings.loads_first else ():
            self._fleet.replicas[move.decode].loop.wake_at(now)  # blocks become free
            self._fleet.plan(move.decode)
        return [move.request for move in moves]

    def _forget(self, request: Request, now: float) -> None:
        """Forget the choices for a request, and the copy of its KV."""
        transfers = self._fleet.transfers
        move = None if transfers is None else transfers.forget(request, now)
        if move is not None and transfers is not None and move.copy not in transfers.copies:
            self._fleet.forget_choice(move.copy)
        self._fleet.forget_choice(request)

    def _send_again(self, request: Request, now: float) -> None:
        """Bring a request to the router again, as it was sent."""
        self._forget(request, now)
        reset_request(request)
        self._arrive_now(request, now)
        self._retried += 1

    def _arrive_now(self, request: Request, now: float) -> None:
        request.arrival = request.visible_at = request.received = request.state_since = now
        self._world.call(now, self._fleet.send_again, request, LATER + request.serial)

    def _lose(self, request: Request, now: float, reason: str) -> None:
        """End a request without an answer."""
        self._forget(request, now)
        request.status, request.outcome, request.reason = "done", "lost", reason
        request.finish = request.client_end = now
        self._fleet.clients.ended(request, now)

    # Replicas that leave and return

    def _drain(self, number: int, pause: Optional[float] = None) -> None:
        self._draining[number] = pause
        self._set_present()
        self.check_drained(number)

    def check_drained(self, number: int) -> None:
        """Let a replica that drains leave when it has no request and no KV for others, and none will come."""
        if number not in self._draining or not self._is_empty(number):
            return
        pause = self._draining.pop(number)
        self.alive.discard(number)
        self._leave(number, max(self._world.now, self._fleet.replicas[number].loop.now), pause)

    def _is_empty(self, number: int) -> bool:
        transfers = self._fleet.transfers
        return self._fleet.replicas[number].is_empty and (transfers is None or not transfers.uses(number))

    def _leave(self, number: int, now: float, pause: Optional[float]) -> None:
        """Remove a replica, for ever or for some seconds."""
        loop = self._fleet.replicas[number].loop
        loop.server.waits.stop(now)
        loop.returns_at = loop.decides_at = math.inf
        self._fleet.plan(number)
        self._notice()
        if pause is not None:
            self._returning.add(number)
            self._world.call(now + pause, self._start, number, LAST)
        elif number in self._there_since:
            self._removed.append((number, self._there_since.pop(number), now))

    def _start(self, number: int) -> None:
        """Start a replica without requests."""
        fleet, loop = self._fleet, self._rebuild(number)
        if fleet.transfers is not None:
            prefills = number not in fleet.decode_replicas
            loop.arrivals.port = fleet.transfers.make_port(number, loop.server, loop.inbox, loop.wake, prefills)
        fleet.loops.append(loop)
        fleet.share_totals(loop)
        fleet.attach(loop)
        fleet.replicas[number].replace(loop, self._world.now)
        fleet.plan(number)
        self._slow[number].clear()
        self._usual_cost.pop(number, None)
        self._returning.discard(number)
        self.alive.add(number)
        self._notice()

    def _notice(self) -> None:
        """Let the router see which replicas are there, after some seconds."""
        if self._changes.detect:
            self._world.call(self._world.now + self._changes.detect, self._see, None)
        else:
            self._see(None)

    def _see(self, _: None) -> None:
        self._set_present()
        if self._fleet.present and self._outside:
            waiting, self._outside = self._outside, []
            for _decodes, request in waiting:
                self._arrive_now(request, self._world.now)

    def _set_present(self) -> None:
        fleet = self._fleet
        there = sorted(self.alive.difference(self._draining))
        fleet.present = [number for number in there if number not in fleet.decode_replicas]
        fleet.present_decodes = [number for number in there if number in fleet.decode_replicas]

    def route(self, decodes: bool, request: Request, client: Request) -> int:
        """Return the replica of a request, which waits at the router if there is none."""
        fleet = self._fleet
        present = fleet.present_decodes if decodes else fleet.present
        if present:
            number = fleet.choose(decodes, request)
            if number in self.alive:
                return number
            fleet.forget_choice(request)
            if not self._changes.retry:
                self._lose(client, self._world.now, "its replica was gone")
                return NO_REPLICA
            self._retried += 1
            alive = [number for number in present if number in self.alive]
            if alive:
                return fleet.choose(decodes, request, alive)
        if request is not client:
            fleet.forget_choice(client)
        self._outside.append((decodes, client))
        return NO_REPLICA

    def lose_rest(self) -> None:
        """Lose the requests that no replica could take, and those that follow them."""
        while self._outside:
            request = self._outside.pop()[1]
            ends = [replica.last_call for replica in self._fleet.replicas]  # events after these changed nothing
            self._lose(request, max(request.visible_at, *ends), "no replica was left")
            if not self._outside:
                self._world.run()  # requests that follow these; blocks may be free now

    # Scaling

    def _run_scaling(self) -> Generator[simpy.Event, Any, None]:
        rules = self._changes.scaling
        ticks = [rule.interval for rule in rules]
        while self._has_work():
            yield self._world.at(min(ticks))
            for place, rule in enumerate(rules):
                if ticks[place] <= self._world.now:
                    self._scale(rule)
                    ticks[place] = self._next_tick(rule)

    def _next_tick(self, rule: Scaling) -> float:
        """Return the time of the next decision. Until a request comes, a fleet without work stays as it is."""
        now, arrival = self._world.now, self._world.peek()
        there = self.alive.intersection(rule.replicas)
        rests = len(there) == rule.min and not (self._outside or self._returning or self._draining)
        if rests and now < arrival < math.inf and all(self._is_empty(number) for number in self.alive):
            return now + rule.interval * max(1, math.ceil((arrival - now) / rule.interval))
        return now + rule.interval

    def _has_work(self) -> bool:
        """Whether requests will come, or are there and can be served."""
        if self._world.peek() < math.inf:
            return True
        if not self._outside and all(self._is_empty(number) for number in self.alive):
            return False
        is_running = any(self._fleet.replicas[number].loop.next_time < math.inf for number in self.alive)
        return is_running or any(self._needed(rule) for rule in self._changes.scaling)

    def _needed(self, rule: Scaling) -> int:
        """Return 1 if a pool needs a replica more, -1 if it needs one less."""
        serving = sorted(self.alive.intersection(rule.replicas).difference(self._draining))
        if self._returning.intersection(rule.replicas):
            return 0
        decodes = rule.replicas[0] in self._fleet.decode_replicas
        waiting = len([request for for_decode, request in self._outside if for_decode == decodes])
        for number in serving:
            loop = self._fleet.replicas[number].loop
            port = loop.arrivals.port
            waiting += len(loop.server.waiting) + loop.inbox.unseen + (0 if port is None else len(port.queue))
        if waiting > rule.target_queue * len(serving):
            return 1 if len(serving) < rule.max and not self.alive.issuperset(rule.replicas) else 0
        return -1 if not waiting and len(serving) > rule.min else 0

    def _scale(self, rule: Scaling) -> None:
        """Order a replica, or let one drain."""
        needed = self._needed(rule)
        if needed > 0:
            number = next(number for number in rule.replicas if number not in self.alive)
            self._returning.add(number)
            self._there_since.setdefault(number, self._world.now)
            self._world.call(self._world.now + rule.start_up, self._start, number, LAST)
        elif needed < 0:
            self._drain(max(self.alive.intersection(rule.replicas).difference(self._draining)))


def end_requests(loop: Loop, now: float, reason: str) -> list[Request]:
    """End all requests of a server, and its steps in flight, whose results are lost. Return the requests."""
    server, step, notices = loop.server, loop.server.flight, loop.notices
    requests = [*server.all_requests(), *notices.unreported]
    cut: list[Step] = []
    while step is not None:
        cut.insert(0, step)
        step = step.before
    if cut:
        loop.last_call = now
        count_cut_step(server, cut[0], now)
    else:
        loop.idle_s += now - loop.now
    loop.now = now
    rejections = [Rejection(request, reason, "aborted") for request in requests if request.status != "done"]
    if rejections:
        loop.arrivals.abort(rejections, now)
    for step in cut:
        step.end = now
        notices.end_without_call(step, now)
        notices.returned(step, now)
    server.flight = None
    return requests
