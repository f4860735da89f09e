"""The decision log: one JSON line per step, enough to compare with the recording of a real engine.

`free` counts free blocks after the plan was carried out. `free_after` counts them after the model call, when finished
requests have returned theirs. Both are null if the policy uses no block pool. `waiting`, `running` and `swapped` are
the queues at the start of the model call. `t` is the time of the decision. With steps in flight, `start` is that of the
model call if it is later, and `t_end` is the time at which the step returned. In a fleet, a line has the name of its
replica; the lines of one replica are in order, those of several may not be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, TextIO

from servesim.core import Chunk, Request
from servesim.engine.rules import EngineRules
from servesim.engine.server import Server
from servesim.engine.shape import runs_as_decode
from servesim.engine.step import Step, batch


class DecisionLog:
    """Writes one line for every step that runs or moves requests."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.steps = 0
        # with steps in flight, a step may start before the last one has ended
        self._started: list[tuple[Server, StepSnapshot]] = []

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        self._started.append((server, snapshot(server, step, arrived)))

    def _take(self, server: Server, step: Step) -> StepSnapshot:
        """Return the start of a step that has ended. The steps of a server end in the order in which they start."""
        index = [started.step for _, started in self._started].index(step)
        taken = self._started[index][1]
        # older ones of this server had no model call and moved nothing; those of other ranks have not ended
        self._started[: index + 1] = [pair for pair in self._started[:index] if pair[0] is not server]
        return taken

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        line = row(self.steps, self._take(server, step), now, free_blocks(server), finished)
        self.file.write(json.dumps(line) + "\n")
        self.steps += 1


class StepSnapshot(NamedTuple):
    """The queues at the start of a step. The other log fields are read from the step later."""

    replica: str  # its name, in a fleet
    step: Step
    kind: str
    batch: list[tuple[Any, int]]
    prompts: list[Request]
    waiting: list[Request]
    running: list[Request]
    swapped: list[Request]
    slots: Optional[list[Optional[int]]]  # of the running requests, if the engine has slots
    arrived: list[Request]
    rejected: list[Request]  # on arrival
    free: Optional[int]  # None if the policy uses no block pool
    host_free: int
    evictable: Optional[int]  # cached blocks that no request holds, if these are not free
    has_prefix_cache: bool
    sequences: Optional[list[int]]  # of the batch, if requests have several


def snapshot(server: Server, step: Step, arrived: list[Request]) -> StepSnapshot:
    """Return the queues of a step that has started."""
    running, rows = list(server.running), batch(server.running, step)
    by_id = {request.id: request for request in running} if server.view.has_groups else {}
    return StepSnapshot(
        server.name,
        step,
        step.kind,
        rows,
        [chunk.request for chunk in step.chunks if has_prompt(chunk, server.rules)],
        list(server.waiting),
        running,
        list(server.swapped),
        [request.slot for request in running] if server.rules.running_order == "slot" else None,
        arrived,
        [request for request in arrived if request.status == "done"],
        free_blocks(server),
        server.pool.host_free,
        server.pool.evictable if server.prefix_cache is not None and server.prefix_cache.counts_evictable else None,
        server.rules.has_prefix_cache and server.prefix_cache is not None,
        [by_id[id].sequences for id, _ in rows] if by_id else None,
    )


def has_prompt(chunk: Chunk, rules: EngineRules) -> bool:
    """Whether a chunk computes a part of a prompt. A prompt of one token may run as a decode row, but is a prompt."""
    request = chunk.request
    return not runs_as_decode(chunk, rules) or (request.sampling is None and not request._cached)


def free_blocks(server: Server) -> Optional[int]:
    """Return the free blocks, None if the policy uses no block pool."""
    return server.pool.free if server.policy.uses_block_pool else None


def row(
    number: int, start: StepSnapshot, end: float, free: Optional[int], finished: Iterable[Request]
) -> dict[str, Any]:
    """Return the log line of a step."""
    step = start.step
    plan = step.plan
    line = {
        "step": number,
        **({"replica": start.replica} if start.replica else {}),
        "t": step.decided,
        **({} if step.start == step.decided else {"start": step.start}),
        "kind": start.kind,
        "chunks": [list(chunk) for chunk in start.batch],
        "prompts": ids(start.prompts),
        "preempted": [[request.id, how] for request, how, _ in step.preempted],
        "swapped_in": ids(plan.moves.swap_in),
        "rejected": ids(rejection.request for rejection in plan.moves.reject),
        "released": ids(plan.moves.release),
        "free": start.free,
        "host_free": start.host_free,
        "waiting": ids(start.waiting),
        "running": ids(start.running),
        "swapped": ids(start.swapped),
        "arrived": ids(start.arrived),
        "admitted": ids(request for request, _ in step.admitted),
    }
    if start.has_prefix_cache:
        cached = {chunk.request: chunk.cached for chunk in step.chunks}
        line["cached"] = [[request.id, cached[request]] for request, _ in step.admitted]
    if start.evictable is not None:
        line["evictable"] = start.evictable
    if start.sequences is not None:
        line |= {"sequences": start.sequences, "copies": step.shared_copies, "swap_blocks": step.copied_blocks}
    if start.rejected:
        line["rejected_oversized"] = ids(start.rejected)
    if start.slots is not None:
        line["slots"] = start.slots
        line["admitted_slots"] = [slot for _, slot in step.admitted]
        line["preempted_slots"] = [slot for _, _, slot in step.preempted]
    if plan.padding_rows:
        line["padding_rows"] = plan.padding_rows
    return {**line, "t_end": end, "free_after": free, "finished": ids(finished)}


def ids(requests: Iterable[Request]) -> list[Any]:
    return [request.id for request in requests]


class InMemoryLog(DecisionLog):
    """A decision log in memory. Rows are built on demand, because that would slow down the run."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepSnapshot, float, Optional[int], list[Request]]] = []
        self._started: list[tuple[Server, StepSnapshot]] = []

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        self._steps.append((self._take(server, step), now, free_blocks(server), finished))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The log lines of all steps."""
        return [row(number, *step) for number, step in enumerate(self._steps)]
