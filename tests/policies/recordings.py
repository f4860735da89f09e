"""Recordings of real engines: turned into requests, a policy and a server, played, and compared turn by turn.

A recording is {meta, requests, steps, per_request} under a virtual integer clock; its ticks are our seconds here,
so that times compare exactly. ENGINES says which policy plays which engine: another family adds its own line.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from servesim.core import Policy, Request, Stuck
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step, batch

from ..conftest import RECORDINGS

FOLDER = RECORDINGS / "engines"

# meta of a recording -> the policy that must decide as it did
ENGINES: dict[str, Callable[[dict[str, Any]], Policy]] = {}


@dataclass
class Recording:
    """What a real engine did with a list of requests."""

    meta: dict[str, Any]
    requests: list[list[Any]]  # id, arrival, prompt, output, priority
    steps: list[dict[str, Any]]
    per_request: list[list[Any]] = field(default_factory=list)  # id, first token, end, preemptions

    @property
    def knobs(self) -> dict[str, Any]:
        return self.meta["knobs"]


@dataclass
class Played:
    """What our policy did with the same requests."""

    rows: list[dict[str, Any]]
    requests: dict[Any, Request]
    server: Server
    end: float
    stuck: Optional[Stuck] = None

    @property
    def busy(self) -> list[dict[str, Any]]:
        """The turns that ran something."""
        return [row for row in self.rows if row["sched"]]

    @property
    def evictions(self) -> int:
        return sum(request.evictions for request in self.requests.values())


def names(*engines: str) -> list[str]:
    """Return the recordings there are of these engines (beginnings of meta's engine), by file name."""
    found = sorted(path.name for path in FOLDER.glob("*.json.gz"))
    return [name for name in found if load(name).meta["engine"].startswith(engines)]


def load(name: str) -> Recording:
    """Return a recording by its file name, with or without the ending."""
    with gzip.open(FOLDER / (name if name.endswith(".json.gz") else f"{name}.json.gz"), "rt") as file:
        return Recording(**json.load(file))


class Log:
    """Notes every turn as a recording does."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.row: dict[str, Any] = {}

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        decoding = {request.id for request in server.running if request.decodes}
        self.row = {
            "t": step.start,
            "sched": [[id, tokens, "D" if id in decoding else "P"] for id, tokens in batch(server.running, step)],
            "preempted": [[request.id, how] for request, how, _ in step.evicted],
            "swap_in": [request.id for request in step.plan.moves.swap_in],
            "ignored": [rejection.request.id for rejection in step.plan.moves.reject],
            "flushed": [request.id for request in step.plan.moves.release],
            "free_gpu": server.pool.free,
            "free_after": server.pool.free,
            "free_cpu": server.pool.host_free,
            "waiting": [request.id for request in server.waiting],
            "running": [request.id for request in server.running],
            "swapped": [request.id for request in server.swapped],
        }

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        self.row["used"] = server.pool.total - server.pool.free  # LightLLM's is told once the step is over
        self.rows.append(self.row)


def play(recording: Recording, policy: Optional[Policy] = None, leaps: bool = False, **knobs: Any) -> Played:
    """Run a recording's requests under its own policy, or another, with some of its memory knobs changed."""
    if policy is None:
        policy = ENGINES[recording.meta["engine"]](recording.meta)
    knobs = {**recording.knobs, **knobs}
    cost = recording.meta["cost"]
    requests = [Request(id, t, prompt, output, priority=rank) for id, t, prompt, output, rank in recording.requests]
    server = Server(
        policy,
        knobs.get("num_blocks", knobs.get("max_total_token_num", 0)) + policy.traits.reserved_blocks,
        knobs.get("block_size", 1),
        host_blocks=knobs.get("num_cpu_blocks", 0),
        max_model_len=knobs.get("max_model_len"),
    )
    log = Log()
    line = LinearCost(
        base=cost["c0"],
        prefill_token=cost["per_prefill_token"],
        decode_live=cost["per_decode_seq"],
        swap_block=cost["per_swap_block"],
    )
    loop = Loop(server, Inbox(requests), SimulatedClock(line), () if leaps else (log,), check=True)
    stuck = None
    try:
        loop.run()
    except Stuck as error:
        stuck = error
    return Played(log.rows, {request.id: request for request in requests}, server, loop.now, stuck)


def compare(recording: Recording, played: Played, unlisted_victims: bool = False) -> None:
    """Assert that every turn and every request went as recorded; the message shows the first turn that did not.

    unlisted_victims: the engine does not list the first of a turn's victims (those of vLLM v0's priority pass).
    """
    for index, (theirs, ours) in enumerate(zip(recording.steps, played.rows)):
        wrong = [key for key in theirs if not same(key, theirs, ours, unlisted_victims)]
        wrong += [key for key in ("preempted", "swap_in", "ignored") if key not in theirs and ours[key]]
        if unlisted_victims and "preempted" not in theirs:
            wrong = [key for key in wrong if key != "preempted"]
        assert not wrong, f"turn {index} differs in {', '.join(wrong)}\n{differences(recording, played, index, wrong)}"
    counts = len(recording.steps), len(played.rows)
    extra = (recording.steps if counts[0] > counts[1] else played.rows)[min(counts) :][:1]
    assert counts[0] == counts[1], f"{counts[0]} turns recorded, {counts[1]} played ({played.stuck}), then {extra}"
    compare_requests(recording, played)


def same(key: str, theirs: dict[str, Any], ours: dict[str, Any], unlisted_victims: bool) -> bool:
    """Say whether one recorded fact of a turn came out."""
    recorded, got = theirs[key], ours[key]
    if key == "preempted":
        if recorded and not isinstance(recorded[0], list):  # ids without how
            got = [id for id, _ in got]
        if unlisted_victims:
            got = got[len(got) - len(recorded) :]
    return bool(recorded == got)


def differences(recording: Recording, played: Played, index: int, keys: list[str]) -> str:
    """Return the turn before, and what was recorded and played of the turn in question."""
    before = {key: recording.steps[index - 1][key] for key in recording.steps[index - 1]} if index else None
    lines = [f"before: {before}", f"t: {recording.steps[index]['t']} recorded, {played.rows[index]['t']} played"]
    for key in keys:
        lines += [f"{key} recorded: {recording.steps[index].get(key)}", f"{key} played:   {played.rows[index][key]}"]
    return "\n".join([*lines, f"all played: {played.rows[index]}"])


def compare_requests(recording: Recording, played: Played) -> None:
    """Assert first token, end and number of preemptions of every request."""
    for id, first, end, preemptions in recording.per_request:
        request = played.requests[id]
        got = (request.first_token, request.finish if request.outcome == "finished" else None, request.evictions)
        assert got == (first, end, preemptions), f"request {id}: {got} played, {(first, end, preemptions)} recorded"
