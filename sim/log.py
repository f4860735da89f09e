"""The decision log: one JSON line a turn, enough to replay and to compare with a real engine's recording.

`free` is counted when the plan has been carried out and its memory taken, `free_after` when the call has ended and
finished requests have given theirs back; `waiting`, `running` and `swapped` are the queues as the call begins.
"""

from __future__ import annotations

import json
from typing import Any, TextIO

from .core import Request
from .server import Server
from .step import Step, batch


class DecisionLog:
    """Writes a line for every turn that runs or moves something."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.steps = 0
        self._row: dict[str, Any] = {}

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        """Note what was decided."""
        plan = step.plan
        self._row = {
            "step": self.steps,
            "t": step.start,
            "kind": step.kind,
            "chunks": [list(part) for part in batch(server.running, step)],
            "prompts": [chunk.request.id for chunk in step.chunks],
            "evicted": [[request.id, how] for request, how, _ in step.evicted],
            "swapped_in": [request.id for request in plan.swap_in],
            "rejected": [rejection.request.id for rejection in plan.reject],
            "released": [request.id for request in plan.release],
            "free": server.pool.free,
            "host_free": server.pool.host_free,
            "waiting": [request.id for request in server.waiting],
            "running": [request.id for request in server.running],
            "swapped": [request.id for request in server.swapped],
            "arrived": [request.id for request in arrived],
            "admitted": [request.id for request, _ in step.admitted],
        }
        refused = [request.id for request in arrived if request.place == "done"]
        if refused:
            self._row["refused"] = refused
        if server.policy.running_order == "slot":
            self._row["slots"] = [request.slot for request in server.running]
            self._row["admitted_slots"] = [slot for _, slot in step.admitted]
            self._row["evicted_slots"] = [slot for _, _, slot in step.evicted]
        if plan.padding:
            self._row["padding"] = plan.padding

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        """Note what came of it, and write the line."""
        self._row["t_end"] = now
        self._row["free_after"] = server.pool.free
        self._row["finished"] = [request.id for request in over]
        self.file.write(json.dumps(self._row) + "\n")
        self.steps += 1
