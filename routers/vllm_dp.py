"""The data-parallel balancer of vLLM: the client of an API server process chooses an engine.

The client knows the counts that the coordinator published last, and adds its own requests to them. A publication
replaces the counts. Ties go to the first engine in the order of its scan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from servesim.core.native import mypyc_attr

from .router import Asked, Fleet, Memory, Replica, Router, least

Version = Literal["0.10", "0.25", "0.27"]  # of vLLM, from which on a rule holds
KV_FREE = 0.5  # share of used KV blocks up to which waiting requests cost no more than running ones
KV_PENALTY = 6.0


class ClientMemory(Memory):
    """The counts that the client holds: those published last, and what it added."""

    def __init__(self, replicas: int, start: int) -> None:
        super().__init__(replicas)
        self.waiting = [0] * replicas
        self.running = [0] * replicas
        self.kv_usage = [0.0] * replicas
        self.start = start  # engine at which the next scan starts


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VllmDataParallel(Router):
    """The engine with the fewest requests, waiting ones counted more."""

    version: Version = "0.27"
    clients: int = 1  # API server processes
    client: int = 0  # number of this one

    @property
    def report_interval(self) -> float:
        return 0.1

    def memory(self, replicas: int) -> Any:
        return ClientMemory(replicas, replicas * self.client // self.clients)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        memory: ClientMemory = fleet.memory
        present = sorted(fleet.present)
        first = bisect_left(present, memory.start)  # ties go to the first one from here on
        return least(self.scores(memory), present[first:] + present[:first])[:1]

    def scores(self, memory: ClientMemory) -> list[float]:
        """Return the loads of all engines."""
        if self.version != "0.27":
            return [4.0 * waiting + running for waiting, running in zip(memory.waiting, memory.running)]
        loads = [
            float(max(self.clients * own, waiting + running))
            for own, waiting, running in zip(memory.in_flight, memory.waiting, memory.running)
        ]
        for engine, waiting in enumerate(memory.waiting):
            if waiting:
                loads[engine] += KV_PENALTY * waiting * max(0.0, memory.kv_usage[engine] - KV_FREE)
        return loads

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        memory: ClientMemory = fleet.memory
        memory.waiting[replica] += self.clients
        if self.version != "0.10":
            memory.start = (memory.start + 1) % len(memory.waiting)

    def reported(self, memory: Any, replicas: Sequence[Replica]) -> None:
        memory.waiting = [replica.waiting for replica in replicas]
        memory.running = [replica.running for replica in replicas]
        memory.kv_usage = [replica.kv_usage for replica in replicas]
