"""The decision log: one JSON line a turn, enough to replay and to compare with a real engine's recording.

`free` is counted when the plan has been carried out and its memory taken, `free_after` when the call has ended and
finished requests have given theirs back, both null where no memory is counted; `waiting`, `running` and `swapped` are
the queues as the call begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, TextIO

from servesim.core import Request
from servesim.engine.server import Server
from servesim.engine.step import Step, batch


class DecisionLog:
    """Writes a line for every turn that runs or moves something."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.steps = 0
        self._now: Optional[Glance] = None

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        self._now = glance(server, step, arrived)

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        assert self._now is not None
        line = row(self.steps, self._now, now, free_blocks(server), over)
        self.file.write(json.dumps(line) + "\n")
        self.steps += 1


class Glance(NamedTuple):
    """What must be noted of a turn before it goes on; the rest can be read off its step at leisure."""

    step: Step
    kind: str
    batch: list[tuple[Any, int]]
    waiting: list[Request]
    running: list[Request]
    swapped: list[Request]
    slots: Optional[list[Optional[int]]]  # of the running ones, where the engine has slots
    arrived: list[Request]
    refused: list[Request]
    free: Optional[int]  # None where no memory is counted
    host_free: int


def glance(server: Server, step: Step, arrived: list[Request]) -> Glance:
    """Look at a turn between its begin and its end."""
    running = list(server.running)
    return Glance(
        step,
        step.kind,
        batch(running, step),
        list(server.waiting),
        running,
        list(server.swapped),
        [request.slot for request in running] if server.traits.running_order == "slot" else None,
        arrived,
        [request for request in arrived if request.place == "done"],
        free_blocks(server),
        server.pool.host_free,
    )


def free_blocks(server: Server) -> Optional[int]:
    """Return the free blocks, where there is a memory that is counted."""
    return server.pool.free if server.policy.paged else None


def row(number: int, seen: Glance, end: float, free: Optional[int], over: Iterable[Request]) -> dict[str, Any]:
    """Return the line of a turn."""
    step = seen.step
    plan = step.plan
    line = {
        "step": number,
        "t": step.start,
        "kind": seen.kind,
        "chunks": [list(part) for part in seen.batch],
        "prompts": ids(chunk.request for chunk in step.chunks),
        "evicted": [[request.id, how] for request, how, _ in step.evicted],
        "swapped_in": ids(plan.moves.swap_in),
        "rejected": ids(rejection.request for rejection in plan.moves.reject),
        "released": ids(plan.moves.release),
        "free": seen.free,
        "host_free": seen.host_free,
        "waiting": ids(seen.waiting),
        "running": ids(seen.running),
        "swapped": ids(seen.swapped),
        "arrived": ids(seen.arrived),
        "admitted": ids(request for request, _ in step.admitted),
    }
    if seen.refused:
        line["refused"] = ids(seen.refused)
    if seen.slots is not None:
        line["slots"] = seen.slots
        line["admitted_slots"] = [slot for _, slot in step.admitted]
        line["evicted_slots"] = [slot for _, _, slot in step.evicted]
    if plan.padding:
        line["padding"] = plan.padding
    return {**line, "t_end": end, "free_after": free, "finished": ids(over)}


def ids(requests: Iterable[Request]) -> list[Any]:
    return [request.id for request in requests]


class Notes(DecisionLog):
    """A decision log kept in memory, its rows made up when they are asked for: that would take time from the run."""

    def __init__(self) -> None:
        self._seen: list[tuple[Glance, float, Optional[int], list[Request]]] = []
        self._now: Optional[Glance] = None

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        assert self._now is not None
        self._seen.append((self._now, now, free_blocks(server), over))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every turn, as a line of the log says it."""
        return [row(number, *seen) for number, seen in enumerate(self._seen)]
