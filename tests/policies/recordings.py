"""Play recordings of real engines with a servesim policy, and compare them step by step.

A recording is {meta, requests, steps, per_request} under a virtual integer clock. One tick is 1 s here, so times
compare exactly. ENGINES maps each engine to its policy.
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

# engine -> function from the meta of a recording to the policy that must reproduce it
ENGINES: dict[str, Callable[[dict[str, Any]], Policy]] = {}


@dataclass
class Recording:
    """The decisions of a real engine for a list of requests."""

    meta: dict[str, Any]
    requests: list[list[Any]]  # id, arrival, prompt, output, priority
    steps: list[dict[str, Any]]
    per_request: list[list[Any]] = field(default_factory=list)  # id, first token, end, preemptions

    @property
    def knobs(self) -> dict[str, Any]:
        return self.meta["knobs"]


@dataclass
class PlayedRun:
    """The decisions of a servesim policy for the same requests."""

    rows: list[dict[str, Any]]
    requests: dict[Any, Request]
    server: Server
    finish_time: float
    stuck: Optional[Stuck] = None

    @property
    def busy_steps(self) -> list[dict[str, Any]]:
        """The steps with a model call."""
        return [row for row in self.rows if row["sched"]]

    @property
    def preemptions(self) -> int:
        return sum(request.preemptions for request in self.requests.values())


def recording_names(*engines: str) -> list[str]:
    """Return the file names of the recordings of these engines (prefixes of the engine in meta)."""
    paths = sorted(path.name for path in FOLDER.glob("*.json.gz"))
    return [name for name in paths if load(name).meta["engine"].startswith(engines)]


def load(name: str) -> Recording:
    """Return a recording by its file name, with or without the suffix."""
    with gzip.open(FOLDER / (name if name.endswith(".json.gz") else f"{name}.json.gz"), "rt") as file:
        return Recording(**json.load(file))


class StepLog:
    """Records every step in the format of a recording."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.row: dict[str, Any] = {}

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        decoding = {request.id for request in server.running if request.decodes}
        self.row = {
            "t": step.start,
            "sched": [[id, tokens, "D" if id in decoding else "P"] for id, tokens in batch(server.running, step)],
            "preempted": [[request.id, mode] for request, mode, _ in step.preempted],
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

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        self.row["used"] = server.pool.total - server.pool.free  # LightLLM records it after the step
        self.rows.append(self.row)


def play(recording: Recording, policy: Optional[Policy] = None, fast_forward: bool = False, **knobs: Any) -> PlayedRun:
    """Run the requests of a recording with its policy or another one; `knobs` override its memory settings."""
    if policy is None:
        policy = ENGINES[recording.meta["engine"]](recording.meta)
    knobs = {**recording.knobs, **knobs}
    cost = recording.meta["cost"]
    requests = [Request(id, t, prompt, output, priority=level) for id, t, prompt, output, level in recording.requests]
    server = Server(
        policy,
        knobs.get("num_blocks", knobs.get("max_total_token_num", 0)) + policy.traits.reserved_blocks,
        knobs.get("block_size", 1),
        host_blocks=knobs.get("num_cpu_blocks", 0),
        max_model_len=knobs.get("max_model_len"),
    )
    log = StepLog()
    cost_model = LinearCost(
        base=cost["c0"],
        prefill_token=cost["per_prefill_token"],
        decode_live=cost["per_decode_seq"],
        swap_block=cost["per_swap_block"],
    )
    loop = Loop(server, Inbox(requests), SimulatedClock(cost_model), () if fast_forward else (log,), check=True)
    stuck = None
    try:
        loop.run()
    except Stuck as error:
        stuck = error
    return PlayedRun(log.rows, {request.id: request for request in requests}, server, loop.now, stuck)


def compare(recording: Recording, played: PlayedRun, unlisted_victims: bool = False) -> None:
    """Assert that every step and every request is as recorded; the message shows the first step that differs.

    unlisted_victims: the engine does not list the first victims of a step (those of vLLM v0's priority pass).
    """
    for index, (expected, actual) in enumerate(zip(recording.steps, played.rows)):
        wrong = [key for key in expected if not matches(key, expected, actual, unlisted_victims)]
        wrong += [key for key in ("preempted", "swap_in", "ignored") if key not in expected and actual[key]]
        if unlisted_victims and "preempted" not in expected:
            wrong = [key for key in wrong if key != "preempted"]
        assert not wrong, describe_difference(recording, played, index, wrong)
    counts = len(recording.steps), len(played.rows)
    extra = (recording.steps if counts[0] > counts[1] else played.rows)[min(counts) :][:1]
    assert counts[0] == counts[1], f"{counts[0]} steps recorded, {counts[1]} played ({played.stuck}), then {extra}"
    compare_requests(recording, played)


def matches(key: str, expected: dict[str, Any], actual: dict[str, Any], unlisted_victims: bool) -> bool:
    """Return whether one field of a step is as recorded."""
    recorded, got = expected[key], actual[key]
    if key == "preempted":
        if recorded and not isinstance(recorded[0], list):  # ids without the mode
            got = [id for id, _ in got]
        if unlisted_victims:
            got = got[len(got) - len(recorded) :]
    return bool(recorded == got)


def describe_difference(recording: Recording, played: PlayedRun, index: int, keys: list[str]) -> str:
    """Describe the previous step, and the recorded and played values of this one."""
    before = {key: recording.steps[index - 1][key] for key in recording.steps[index - 1]} if index else None
    lines = [f"step {index} differs in {', '.join(keys)}", f"before: {before}"]
    lines.append(f"t: {recording.steps[index]['t']} recorded, {played.rows[index]['t']} played")
    for key in keys:
        lines += [f"{key} recorded: {recording.steps[index].get(key)}", f"{key} played:   {played.rows[index][key]}"]
    return "\n".join([*lines, f"all played: {played.rows[index]}"])


def compare_requests(recording: Recording, played: PlayedRun) -> None:
    """Assert first token, finish time and number of preemptions of every request."""
    for id, *recorded in recording.per_request:
        request = played.requests[id]
        got = [request.first_token, request.finish if request.outcome == "finished" else None, request.preemptions]
        assert got == recorded, f"request {id}: {got} played, {recorded} recorded"
