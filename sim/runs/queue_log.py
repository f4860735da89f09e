"""The queues of a run over time: an observer that keeps a bounded number of points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from servesim.core import FOREVER, Request
from servesim.engine.server import Server
from servesim.engine.step import Step


class Queues(NamedTuple):
    """How many requests were where at one instant, and the blocks they held."""

    waiting: int
    running: int
    swapped: int
    held: int


def queue_lengths(server: Server) -> dict[str, int]:
    """Return how many requests are where."""
    return {"waiting": len(server.waiting), "running": len(server.running), "swapped": len(server.swapped)}


class QueueLog:
    """Keeps the queues and the blocks in use, thinned out evenly in time once there are too many points."""

    def __init__(self, points: int = 300) -> None:
        self.points = points
        self.times: list[float] = []
        self.queues: list[Queues] = []
        self._apart = 0.0  # seconds between points kept

    def begun(self, server: Server, step: Step, arrived: Sequence[Request]) -> None:
        self._note(server, step.start)

    def ended(self, server: Server, step: Step, now: float, over: Sequence[Request]) -> None:
        if server.idle():
            self._note(server, now)

    def _note(self, server: Server, now: float) -> None:
        if self.times and now - self.times[-1] < self._apart:
            return
        pool = server.pool
        held = pool.total - pool.free if pool.total < FOREVER else 0
        self.times.append(now)
        self.queues.append(Queues(**queue_lengths(server), held=held))
        if len(self.times) >= 2 * self.points:
            self.times, self.queues = self.times[::2], self.queues[::2]
            self._apart = (self.times[-1] - self.times[0]) / self.points
