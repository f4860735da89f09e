"""Queue lengths and used blocks over time, as an observer that keeps a limited number of points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from servesim.core import FOREVER, Request
from servesim.engine.server import Server
from servesim.engine.step import Step


class Queues(NamedTuple):
    """Queue lengths and used KV blocks at one time."""

    waiting: int
    running: int
    swapped: int
    blocks_used: int


def queue_lengths(server: Server) -> dict[str, int]:
    """Return the lengths of the three queues."""
    return {"waiting": len(server.waiting), "running": len(server.running), "swapped": len(server.swapped)}


class QueueLog:
    """Keeps queue lengths and used blocks; drops every second point if there are too many."""

    def __init__(self, points: int = 300) -> None:
        self.points = points
        self.times: list[float] = []
        self.queues: list[Queues] = []
        self._interval = 0.0  # minimum seconds between points

    def on_step_start(self, server: Server, step: Step, arrived: Sequence[Request]) -> None:
        self._add_point(server, step.start)

    def on_step_end(self, server: Server, step: Step, now: float, finished: Sequence[Request]) -> None:
        if server.idle():
            self._add_point(server, now)

    def _add_point(self, server: Server, now: float) -> None:
        if self.times and now - self.times[-1] < self._interval:
            return
        pool = server.pool
        used = pool.total - pool.free if pool.total < FOREVER else 0
        self.times.append(now)
        self.queues.append(Queues(**queue_lengths(server), blocks_used=used))
        if len(self.times) >= 2 * self.points:
            self.times, self.queues = self.times[::2], self.queues[::2]
            self._interval = (self.times[-1] - self.times[0]) / self.points
