"""The stages of a server with pipeline parallelism: when each of them can start with the next batch.

A batch passes the stages one after another, and each of them has one batch at a time. A stage takes an equal share of
the time of a step. So a batch alone takes as long as without stages, and with a batch in each of them the server
returns one batch per share.
"""

from __future__ import annotations

from typing import Optional

from servesim.core import Plan

from .step import Step


class Pipeline:
    """The stages of one server."""

    def __init__(self, stages: int) -> None:
        self._free_at = [0.0] * stages
        self._last_end = 0.0  # of the batches that have returned

    def start(self, plan: Plan, flight: Step, now: float) -> float:
        """Return when a batch starts: the first stage is free, and the tokens of its requests in flight are there."""
        start = max(now, self._free_at[0])
        needed = {chunk.request for chunk in plan.chunks if chunk.request._in_flight}
        step: Optional[Step] = flight
        while needed and step is not None:
            if any(row.request in needed for row in step.verified):
                return max(start, step.end)
            step = step.before
        return start

    def run(self, start: float, seconds: float) -> float:
        """Run a batch that takes these seconds in all stages. Return its end."""
        share, time = seconds / len(self._free_at), start
        for stage, free_at in enumerate(self._free_at):
            time = max(time, free_at) + share
            self._free_at[stage] = time
        return time

    def busy(self, step: Step, now: float) -> float:
        """Return the seconds of a step that returns now in which no step before it has run."""
        start, self._last_end = max(step.start, self._last_end), now
        return now - start
