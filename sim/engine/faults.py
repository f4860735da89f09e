"""Replicas that come and go: faults and restarts. `autoscale.py` has the rules that add and remove replicas.

A fault is an interrupt of the process of its replica. A replica that crashes loses its KV cache and all of its
requests, and returns empty. The router sees which replicas are there only after `detect` seconds; a request that it
sends to a replica that is gone fails at once. With `retry`, a request without a token is sent again; a client that has
got a part of its answer gets an error. A request that no replica can take waits at the router.

With prefill and decode apart, a prefill replica that crashes loses the KV that is not copied: a decode replica computes
these prompts, or lets the requests fail, as after a time-out. If a decode replica crashes, the blocks on the prefill
side stay until the time-out. A replica that drains stays until its KV is copied.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Callable, Optional

import simpy
from servesim.core import Request, StepCost
from servesim.core.request import cut_request, reset_request
from servesim.routers.router import Router

from .changes import Changes, Fault, Start
from .fleet import LAST, NO_REPLICA, Ask, Fleet
from .loop import Loop
from .replica import Replica
from .transfers import Transfers


class ChangingFleet(Fleet):
    """A fleet whose replicas come and go.

    `rebuild` returns a new loop for a replica, `slow_down` a cost model with the times of another one, multiplied.
    """

    def __init__(
        self, replicas: Sequence[Replica], router: Router, requests: Sequence[Request], ask: Ask, seed: int,
        staleness: float, rebuild: Callable[[int], Loop], slow_down: Callable[[StepCost, float], StepCost],
        changes: Changes, transfers: Optional[Transfers] = None,
        decode: Optional[tuple[Router, Sequence[int]]] = None,
    ) -> None:  # fmt: skip
        super().__init__(replicas, router, requests, ask, seed, staleness, transfers, decode, changes=True)
        self._requests = requests
        self._rebuild = rebuild
        self._slow_down = slow_down
        self._changes = changes
        self._times = [fault.at for fault in changes.faults]  # heap of the times of changes
        heapify(self._times)
        self._alive = set(range(len(replicas))).difference(*[rule.replicas[rule.min :] for rule in changes.scaling])
        # replicas that get no more requests, and for how many seconds they are then away; None: for ever
        self._draining: dict[int, Optional[float]] = {}
        self._drained_at: dict[int, float] = {}  # when it began
        self._returning: set[int] = set()  # these are gone, and come back by themselves
        self._outside: list[tuple[bool, Request]] = []  # requests that no replica (for a decode?) can take
        self._slow: list[list[Fault]] = [[] for _ in replicas]  # by replica: faults that make it slow now
        self._usual_cost: dict[int, StepCost] = {}  # of these replicas
        self._there_since = dict.fromkeys(self._alive, 0.0)  # time of the order of each replica
        self._removed: list[tuple[int, float, float]] = []  # replicas, times of their order and of their end
        self.retried = 0
        self._set_present()
        self._start_changes()

    def _start_changes(self) -> None:
        """Start the processes that change the fleet."""
        for fault in self._changes.faults:
            self._env.process(self._run_fault(fault))

    def run(self) -> float:
        """Run until all requests are done or lost. Return the time."""
        super().run()
        self._set_times()  # requests may have been lost at the end
        return self.now

    def _set_times(self) -> None:
        """Set the end of the run: that of the last model call or request. A replica may start after it."""
        super()._set_times()
        idle = self.now - self.idle_s
        self.now = max([self._last_end(), *[replica.call_end for replica in self.replicas]])
        self.idle_s = self.now - idle

    def _last_end(self) -> float:
        return max([request.client_end for request in self._requests if request.client_end is not None], default=0.0)

    def metrics(self) -> dict[str, Any]:
        return {"replica_seconds": sum(self.seconds_there()), "retried": self.retried}

    def seconds_there(self) -> list[float]:
        """Return the seconds of each replica from its order to its removal, between the first request and last end."""
        first, last = min([request.sent for request in self._requests], default=0.0), self._last_end()
        seconds = [0.0] * len(self.replicas)
        there = [(number, since, last) for number, since in self._there_since.items()]
        for number, since, until in [*self._removed, *there]:
            seconds[number] += max(0.0, min(until, last) - max(since, first))
        return seconds

    # Faults

    def _run_fault(self, fault: Fault) -> Generator[simpy.Event, Any, None]:
        yield from self._sleep(fault.at)
        heappop(self._times)
        if fault.kind != "slow":
            self._replica_processes[fault.replica].interrupt(fault)
            return
        if fault.replica not in self._alive:
            return
        slow = self._slow[fault.replica]
        slow.append(fault)
        self._change_cost(fault.replica)
        if fault.recover is not None:
            heappush(self._times, fault.at + fault.recover)
            yield from self._sleep(fault.at + fault.recover)
            heappop(self._times)
            if fault in slow:  # a new server is not slow
                slow.remove(fault)
                self._change_cost(fault.replica)

    def _change_cost(self, number: int) -> None:
        """Use the step times of a replica that some faults make slow, from now on."""
        replica = self.replicas[number]
        replica.run_held(self._env.now)
        clock: Any = replica.loop.clock
        cost = self._usual_cost.setdefault(number, clock.cost)
        for fault in self._slow[number]:
            cost = self._slow_down(cost, fault.factor)
        clock.change_cost(cost)
        self._replica_processes[number].interrupt()

    def _run_replica(self, number: int) -> Generator[simpy.Event, Any, None]:
        if number not in self._alive:
            yield from self._stay_away(number, 0.0, None)
        while True:
            time = self._run_steps(number)
            is_drained = number in self._draining and self._is_empty(number)
            emptied = self._emptied(number) if is_drained else math.inf
            cause = yield from self._sleep(emptied if is_drained else time, LAST + number)
            if isinstance(cause, Fault) and cause.kind == "crash":
                self._crash(number)
                yield from self._stay_away(number, self._env.now, cause.recover)
            elif isinstance(cause, Fault):
                self._drain(number, cause.recover)
            elif is_drained and self._is_empty(number) and emptied <= self._env.now:
                pause = self._draining[number]
                self._leave(number)
                yield from self._stay_away(number, emptied, pause)

    def _stay_away(self, number: int, since: float, pause: Optional[float]) -> Generator[simpy.Event, Any, None]:
        """Wait until a replica comes back after a pause, or because the rule starts it; then start it without requests.

        One that does not come back by itself is removed.
        """
        until = math.inf
        if pause is not None:
            until = since + pause
            self._returning.add(number)
        elif number in self._there_since:
            self._removed.append((number, self._there_since.pop(number), since))
        while self._env.now < until:
            self.replicas[number].wakes_at = until
            cause = yield from self._sleep(until)
            if isinstance(cause, Start):
                until = self._env.now + cause.seconds
        loop = self._rebuild(number)
        if self.transfers is not None:
            prefills = number not in self.decode_replicas
            loop.port = self.transfers.make_port(number, loop.server, loop.inbox, prefills)
        self.loops.append(loop)
        self.share_totals(loop)
        self._attach(loop)
        self.replicas[number].replace(loop, self._env.now)
        self._slow[number].clear()
        self._usual_cost.pop(number, None)
        self._returning.discard(number)
        self._alive.add(number)
        self._notice(self._changes.detect)

    def _is_empty(self, number: int) -> bool:
        """Whether a replica has no request and no KV for others, and none will come."""
        return self.replicas[number].is_empty and (self.transfers is None or not self.transfers.uses(number))

    def _emptied(self, number: int) -> float:
        """Return when a replica that drains had no request any more."""
        ends = [r.finish for r in self._requests if r.finish is not None and self.replica_of.get(r.id) == number]
        port = self.replicas[number].loop.port
        return max([self._drained_at[number], 0.0 if port is None else port.freed_at, *ends])

    def _drain(self, number: int, pause: Optional[float] = None) -> None:
        self._drained_at[number] = self._env.now
        self._draining[number] = pause
        self._notice(0.0)

    def _leave(self, number: int) -> None:
        self.replicas[number].server.waits.stop(self._env.now)
        self._alive.discard(number)
        self._draining.pop(number, None)

    def _crash(self, number: int) -> None:
        """Take all requests from a replica; send them again, or lose them."""
        now, replica = self._env.now, self.replicas[number]
        replica.run_held(now)
        self._release()
        requests = self._take_requests(number, replica.loop, now)
        replica.crash(now)
        self._leave(number)
        self._notice(self._changes.detect)
        self._tell_router(now)
        if number in self.decode_replicas:
            self._free_decodes(number, requests)
        elif self.transfers is not None:
            requests = self._lose_prefills(number, now)
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
        undone = [request for time, request in self._ended if time > now and self.replica_of.get(request.id) == number]
        for request in undone:
            self.arrivals.take_back_end(request)
        running = [request for request in loop.server.all_requests() if request.status != "done"]
        for request in running:
            loop.abort(request, now, "its replica crashed")
        waiting = [] if loop.port is None else loop.port.take_all()
        unseen = loop.inbox.take_all(() if self.transfers is None else self.transfers.copied_to(number))
        taken = list(dict.fromkeys([*running, *waiting, *undone, *loop._unreported, *unseen]))
        ids = {request.id for request in taken}
        self._ended[:] = [end for end in self._ended if end[1].id not in ids]
        self._ended.extend([(now, request) for request in taken])
        return taken

    def _free_decodes(self, number: int, taken: Sequence[Request]) -> None:
        """Let the requests that would have come to a decode replica go to another one after their prefill."""
        assert self.transfers is not None
        for move in self.transfers.moves.values():
            if move.decode == number and move.request not in taken:
                move.decode = NO_REPLICA
                self._forget_choice(move.request)

    def _lose_prefills(self, number: int, now: float) -> list[Request]:
        """Lose the KV of a prefill replica. Return the requests whose prefill had not ended."""
        assert self.transfers is not None
        moves = self.transfers.lose_prefills(number, now, now + self._changes.detect)
        for move in moves if self.transfers.settings.loads_first else ():
            decode = self.replicas[move.decode]
            decode.run_held(now)
            decode.wakes_at = min(decode.wakes_at, now)  # blocks become free
            self._wake(move.decode)
        return [move.request for move in moves]

    def _forget(self, request: Request, now: float) -> None:
        """Forget the choices for a request, and the copy of its KV."""
        move = None if self.transfers is None else self.transfers.forget(request, now)
        if move is not None and self.transfers is not None:
            if now <= move.ready < math.inf:
                self.arrivals.take_out(request)
            if move.copy not in self.transfers.copies:
                self._forget_choice(move.copy)
        self._forget_choice(request)

    def _send_again(self, request: Request, now: float) -> None:
        """Bring a request to the router again, as it was sent."""
        self._forget(request, now)
        reset_request(request)
        request.arrival = request.visible_at = request.received = request.state_since = now
        self.arrivals.send_again(request, now)
        self.retried += 1

    def _lose(self, request: Request, now: float, reason: str) -> None:
        """End a request without an answer."""
        self._forget(request, now)
        request.status, request.outcome, request.reason = "done", "lost", reason
        cut_request(request, now)
        self.arrivals.end(request, now)

    # What the router sees

    def _notice(self, delay: float) -> None:
        """Let the router see which replicas are there, after some seconds."""
        if delay:
            self._env.process(self._notice_later(delay))
            return
        self._set_present()
        if self.present and self._outside:
            now, waiting = self._env.now, self._outside
            self._outside = []
            for _, request in waiting:
                request.arrival = request.visible_at = request.state_since = now
                self.arrivals.send_again(request, now)
            self._wake_router()

    def _set_present(self) -> None:
        there = sorted(self._alive.difference(self._draining))
        self.present = [number for number in there if number not in self.decode_replicas]
        self.present_decodes = [number for number in there if number in self.decode_replicas]

    def _notice_later(self, delay: float) -> Generator[simpy.Event, Any, None]:
        time = self._env.now + delay
        heappush(self._times, time)
        yield from self._sleep(time)
        heappop(self._times)
        self._notice(0.0)

    def _route(self, decodes: bool, request: Request, client: Request) -> int:
        present = self.present_decodes if decodes else self.present
        if present:
            number = self._choose(decodes, request)
            if number in self._alive:
                return number
            self._forget_choice(request)
            if not self._changes.retry:
                self._lose(client, self._env.now, "its replica was gone")
                return NO_REPLICA
            self.retried += 1
            alive = [number for number in present if number in self._alive]
            if alive:
                return self._choose(decodes, request, alive)
        if request is not client:
            self._forget_choice(client)
        self._outside.append((decodes, client))
        return NO_REPLICA

    def _wake(self, number: int) -> None:
        if number in self._alive:
            super()._wake(number)

    def _horizon(self, number: int) -> float:
        return min([super()._horizon(number), *self._times[:1]])

    def _finish(self) -> None:
        """Lose the requests that no replica could take, and those that follow them."""
        while self._outside or self.arrivals.next_arrival < math.inf:
            request = self._outside.pop()[1] if self._outside else self.arrivals.pop()
            self._lose(request, max(request.visible_at, self.now), "no replica was left")
            if self.transfers is not None and not self._outside:
                self._env.run()  # blocks may be free now
                self.now = max([replica.loop.now for replica in self.replicas])
        for number in self._alive:
            self.replicas[number].finish()
