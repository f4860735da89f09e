"""The decision log: one JSON line per step, enough to compare with the recording of a real engine.

`free` counts free blocks after the plan was carried out. `free_after` counts them after the model call, when finished
requests have returned theirs. Both are null if the policy uses no block pool. `waiting`, `running` and `swapped` are
the queues at the start of the model call. `t` is the time of the decision. With steps in flight, `start` is that of the
model call if it is later, and `t_end` is the time at which the step returned. In a fleet, a line has the name of its
replica; the lines of one replica are in order, those of several may not be.
"""

from __future__ import annotations

import json
from typing import Any, Optional, TextIO

from servesim.core import Chunk, Request
from servesim.engine.rules import EngineRules
from servesim.engine.server import Server
from servesim.engine.shape import runs_as_decode
from servesim.engine.step import Step, batch

REQUESTS = (
    "prompts", "swapped_in", "released", "waiting", "running", "swapped", "arrived", "rejected_oversized", "finished",
)  # fmt: skip
Line = dict[str, Any]  # until it is written, lists of REQUESTS have requests instead of their ids


class InMemoryLog:
    """A decision log in memory. Rows are built on demand, because that would slow down the run."""

    def __init__(self) -> None:
        # with steps in flight, a step may start before the last one has ended
        self._started: list[tuple[Server, Step, Line]] = []
        self._lines: list[Line] = []
        self.steps = 0

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        self._started.append((server, step, start_of_line(server, step, arrived)))

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        # the steps of a server end in the order in which they start
        index = [started for _, started, _ in self._started].index(step)
        start = self._started[index][2]
        # older ones of this server had no model call and moved nothing; those of other ranks have not ended
        self._started[: index + 1] = [entry for entry in self._started[:index] if entry[0] is not server]
        line = {
            "step": self.steps,
            **({"replica": server.name} if server.name else {}),
            "t": step.decided,
            **({} if step.start == step.decided else {"start": step.start}),
            **start,
            "t_end": now,
            "free_after": free_blocks(server),
            "finished": finished,
        }
        self.steps += 1
        self.add(line)

    def add(self, line: Line) -> None:
        self._lines.append(line)

    @property
    def rows(self) -> list[Line]:
        """The log lines of all steps."""
        return [with_ids(line) for line in self._lines]


class DecisionLog(InMemoryLog):
    """Writes one line for every step that runs or moves requests."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.file = file

    def add(self, line: Line) -> None:
        self.file.write(json.dumps(with_ids(line)) + "\n")


def with_ids(line: Line) -> Line:
    return {key: [request.id for request in value] if key in REQUESTS else value for key, value in line.items()}


def start_of_line(server: Server, step: Step, arrived: list[Request]) -> Line:
    """Return what is known of a step when it starts: its batch, its moves and the queues."""
    running, moves, cache = list(server.running), step.plan.moves, server.prefix_cache
    rows = batch(running, step)
    line: Line = {
        "kind": step.kind,
        "chunks": [list(chunk) for chunk in rows],
        "prompts": [chunk.request for chunk in step.chunks if has_prompt(chunk, server.rules)],
        "preempted": [[request.id, how] for request, how, _ in step.preempted],
        "swapped_in": moves.swap_in,
        "rejected": [rejection.request.id for rejection in moves.reject],
        "released": moves.release,
        "free": free_blocks(server),
        "host_free": server.pool.host_free,
        "waiting": list(server.waiting),
        "running": running,
        "swapped": list(server.swapped),
        "arrived": arrived,
        "admitted": [request.id for request, _ in step.admitted],
    }
    if server.rules.has_prefix_cache and cache is not None:
        cached = {chunk.request: chunk.cached for chunk in step.chunks}
        line["cached"] = [[request.id, cached[request]] for request, _ in step.admitted]
    if cache is not None and cache.counts_evictable:
        line["evictable"] = server.pool.evictable
    if server.view.has_groups and running:
        sequences = {request.id: request.sequences for request in running}
        line["sequences"] = [sequences[id] for id, _ in rows]
        line |= {"copies": step.shared_copies, "swap_blocks": step.copied_blocks}
    rejected = [request for request in arrived if request.status == "done"]
    if rejected:
        line["rejected_oversized"] = rejected
    if server.rules.running_order == "slot":
        line["slots"] = [request.slot for request in running]
        line["admitted_slots"] = [slot for _, slot in step.admitted]
        line["preempted_slots"] = [slot for _, _, slot in step.preempted]
    if step.plan.padding_rows:
        line["padding_rows"] = step.plan.padding_rows
    return line


def has_prompt(chunk: Chunk, rules: EngineRules) -> bool:
    """Whether a chunk computes a part of a prompt. A prompt of one token may run as a decode row, but is a prompt."""
    request = chunk.request
    return not runs_as_decode(chunk, rules) or (request.sampling is None and not request._cached)


def free_blocks(server: Server) -> Optional[int]:
    """Return the free blocks, None if the policy uses no block pool."""
    return server.pool.free if server.policy.uses_block_pool else None
