"""Rules that add and remove replicas: each pool may have one, which decides at intervals."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import simpy

from .changes import Scaling, Start
from .faults import ChangingFleet


class ScaledFleet(ChangingFleet):
    """A fleet with rules that add and remove replicas; faults may change it, too."""

    _ticks: list[float]  # next decisions of the rules

    def _start_changes(self) -> None:
        super()._start_changes()
        self._ticks = [rule.interval for rule in self._changes.scaling]
        if self._ticks:
            self._env.process(self._run_scaling())

    def _horizon(self, number: int) -> float:
        return min([super()._horizon(number), *self._ticks])

    def _run_scaling(self) -> Generator[simpy.Event, Any, None]:
        while self._has_work():
            yield from self._sleep(min(self._ticks))
            for place, rule in enumerate(self._changes.scaling):
                if self._ticks[place] <= self._env.now:
                    self._scale(rule)
                    self._ticks[place] = self._next_tick(rule)
        self._ticks = []

    def _next_tick(self, rule: Scaling) -> float:
        """Return the time of the next decision. Until a request comes, a fleet without work stays as it is."""
        now, arrival = self._env.now, self.arrivals.next_arrival
        there = self._alive.intersection(rule.replicas)
        rests = len(there) == rule.min and not (self._outside or self._returning or self._draining)
        if rests and now < arrival < math.inf and all(self._is_empty(number) for number in self._alive):
            return now + rule.interval * max(1, math.ceil((arrival - now) / rule.interval))
        return now + rule.interval

    def _has_work(self) -> bool:
        """Whether requests will come, or are there and can be served."""
        if self.arrivals.next_arrival < math.inf:
            return True
        if not self._outside and all(self._is_empty(number) for number in self._alive):
            return False
        return self._env.peek() < math.inf or any(self._needed(rule) for rule in self._changes.scaling)

    def _needed(self, rule: Scaling) -> int:
        """Return 1 if a pool needs a replica more, -1 if it needs one less."""
        serving = sorted(self._alive.intersection(rule.replicas).difference(self._draining))
        if self._returning.intersection(rule.replicas):
            return 0
        decodes = rule.replicas[0] in self.decode_replicas
        waiting = len([request for for_decode, request in self._outside if for_decode == decodes])
        for number in serving:
            loop = self.replicas[number].loop
            waiting += len(loop.server.waiting) + loop.inbox.unseen + (0 if loop.port is None else len(loop.port.queue))
        if waiting > rule.target_queue * len(serving):
            return 1 if len(serving) < rule.max and not self._alive.issuperset(rule.replicas) else 0
        return -1 if not waiting and len(serving) > rule.min else 0

    def _scale(self, rule: Scaling) -> None:
        """Order a replica, or let one drain."""
        needed = self._needed(rule)
        if needed > 0:
            number = next(number for number in rule.replicas if number not in self._alive)
            self._returning.add(number)
            self._there_since.setdefault(number, self._env.now)
            self._replica_processes[number].interrupt(Start(rule.start_up))
        elif needed < 0:
            number = max(self._alive.intersection(rule.replicas).difference(self._draining))
            self._drain(number)
            self._replica_processes[number].interrupt()
