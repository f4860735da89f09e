"""Compare the recorded decisions of a vLLM server with the simulation: the share of equal steps.

The simulation gets the recorded arrivals and step times, so that no decision depends on a predicted time: what differs
is a rule. Every simulated step ends when the server took its next decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from servesim.calibrate.adapter.vllm_recorder import client_id
from servesim.calibrate.replay.resimulate import MeasuredCost, simulate_with_cost
from servesim.calibrate.replay.verify import Decisions
from servesim.config.scenario import FrontEnd, Scenario
from servesim.core import Request, Shape
from servesim.costs.device_profile import Profile
from servesim.files.step_table import MeasuredStep, ModelCall
from servesim.runs.build import copy_requests

from .recording import listed

AT_ONCE = FrontEnd(seconds=0.0, per_request=0.0)  # the delay of the front end is part of the recorded arrivals


class Decision(NamedTuple):
    """What is compared of a step. Rows that decode have no ids: they follow from the other fields."""

    prompts: Mapping[str, int]  # tokens by request
    rows: int  # with those that decode
    tokens: int
    preempted: Sequence[str]


class RecordedTimes(MeasuredCost):
    """The recorded end of every step, also if its shape is another one."""

    def is_same(self, measured: Shape, simulated: Shape) -> bool:
        return True


def compare_decisions(
    scenario: Scenario, requests: Sequence[Request], steps: Sequence[MeasuredStep], profile: Profile
) -> Optional[Decisions]:
    """Simulate recorded steps again; return how many decisions are equal. None if the arrivals are not recorded."""
    seen = arrivals(steps)
    if {str(request.id) for request in requests} != set(seen):
        return None  # the log of an older recorder, or requests of other clients
    origin, copies = min(seen.values()), copy_requests(requests)
    for request in copies:
        request.sent = request.arrival = request.state_since = seen[str(request.id)] - origin
        request.follows = None
    place = {id: number for number, id in enumerate(seen)}
    copies.sort(key=lambda request: place[str(request.id)])
    calls = [ModelCall(0.0, 0.0, end - origin, step.shape) for step, end in zip(steps, step_ends(steps))]
    engine = scenario.engine.model_copy(update={"front_end": AT_ONCE})
    scenario = scenario.model_copy(update={"engine": engine})
    cost = RecordedTimes(calls, profile.cost)
    _, rows = simulate_with_cost(scenario, copies, profile, cost, {"requests": recorded_drafts(steps, requests)})
    ours = [simulated_decision(row) for row in rows if row["chunks"]]
    theirs = map(recorded_decision, steps)
    equal = [one == two for one, two in zip(ours, theirs)]
    return Decisions.of(equal, len(ours), [{"t": (step.start or 0.0) - origin} for step in steps])


def step_ends(steps: Sequence[MeasuredStep]) -> list[float]:
    """Return when every step gives way to the next decision that knows its result."""
    starts = [step.start or 0.0 for step in steps[1:]]
    return [max(step.end or 0.0, start) for step, start in zip(steps, [*starts, 0.0])]


def arrivals(steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """Return when the simulation must see each request, so that the step that saw it first on the server does.

    With asynchronous scheduling, that is the end of the step before the last one.
    """
    ends, times = step_ends(steps), dict[str, float]()
    for k, step in enumerate(steps):
        start, ids = step.start or 0.0, [str(client_id(id)) for id, *_ in listed(step, "arrived")]
        overlaps = k > 1 and (steps[k - 1].end or 0.0) > start
        times.update(dict.fromkeys(ids, min(start, ends[k - 2]) if overlaps else start))
    return times


def recorded_drafts(steps: Sequence[MeasuredStep], requests: Sequence[Request]) -> dict[str, list[list[int]]]:
    """Return of every request its rows with drafts: output tokens before it, drafts, and how many were accepted."""
    rows: dict[str, list[list[int]]] = {str(request.id): [] for request in requests}
    for step in steps:
        for id, *numbers in listed(step, "verified"):
            rows[str(client_id(id))].append(numbers)
    return rows


def recorded_decision(step: MeasuredStep) -> Decision:
    prompts = {str(client_id(id)): tokens for id, tokens, *_ in listed(step, "batch")}
    rows = step.shape.prefill_rows + step.shape.decode_rows
    tokens = step.shape.prefill_tokens + step.shape.decode_rows + step.shape.drafts
    return Decision(prompts, rows, tokens, sorted(str(client_id(id)) for id in listed(step, "preempted")))


def simulated_decision(row: Mapping[str, Any]) -> Decision:
    chunks, prompts = {str(id): tokens for id, tokens in row["chunks"]}, set(map(str, row["prompts"]))
    preempted = sorted(str(id) for id, _ in row["preempted"])
    return Decision({id: chunks[id] for id in prompts}, len(chunks), sum(chunks.values()), preempted)
