"""A plan that names a request twice, or says something impossible, is an error at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from servesim.core import Chunk, Hold, Plan, Policy, Preemption, Rejection, Request, View
from servesim.testing import ContractWorld, simulated

Decide = Callable[[View], Plan]
REQUESTS = [Request(id, 0.0, 8, 4) for id in range(3)]


@dataclass(frozen=True)
class Serves(Policy):
    """Serves all requests, but `decide_first` decides the steps that it wants."""

    decide_first: Callable[[View], object] = field(default=lambda view: None)

    def decide(self, view: View) -> Plan:
        plan = self.decide_first(view)
        if plan is not None:
            return plan  # type: ignore[return-value]
        chunks = [Chunk(request, request.pending) for request in (*view.waiting, *view.prefilling)]
        return Plan(chunks=chunks, decode=not chunks and view.decoding > 0)


def first(view: View) -> Request:
    return view.running[0]


MOVES: dict[str, Decide] = {
    "preempt": lambda view: Plan(preempt=[Preemption(first(view))] * 2),
    "swap_in": lambda view: Plan(swap_in=[view.swapped[0]] * 2) if view.swapped else swap(view),
    "reject": lambda view: Plan(reject=[Rejection(first(view), "no")] * 2),
    "chunks": lambda view: Plan(chunks=[Chunk(first(view), 1)] * 2),
}


def swap(view: View) -> Plan:
    return Plan(preempt=[Preemption(first(view), "swap", "swapped")])


@pytest.mark.parametrize("name", MOVES)
def test_a_request_twice_in_one_list_is_refused(name: str) -> None:
    policy = Serves(decide_first=lambda view: MOVES[name](view) if view.decoding else None)
    with pytest.raises(AssertionError, match=f"{name} has request 0 twice"):
        simulated(policy, ContractWorld(REQUESTS))


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_two_chunks_of_one_prompt_are_refused(tokens: int) -> None:
    policy = Serves(decide_first=lambda view: Plan(chunks=[Chunk(view.waiting[0], tokens)] * 2))
    with pytest.raises(AssertionError, match="chunks has request 0 twice"):
        simulated(policy, ContractWorld(REQUESTS))


def test_admitting_a_request_twice_is_refused() -> None:
    policy = Serves(decide_first=lambda view: Plan(admit=[view.waiting[0]] * 2) if view.waiting else None)
    with pytest.raises(AssertionError, match="admit has request 0 twice"):
        simulated(policy, ContractWorld(REQUESTS))


def test_a_decode_of_all_and_of_one_is_refused() -> None:
    """The request would be twice in the batch of the decision log, and once in the step."""
    policy = Serves(
        decide_first=lambda view: Plan(chunks=[Chunk(first(view), 1)], decode=True) if view.decoding else None
    )
    with pytest.raises(AssertionError, match="request 0 has a chunk and also decodes with all others"):
        simulated(policy, ContractWorld(REQUESTS))


@pytest.mark.parametrize(
    ("mode", "queue"), [("nonsense", "front"), ("swap", "front"), ("keep", "back"), ("recompute", "nowhere")]
)
def test_an_unknown_preemption_is_refused(mode: str, queue: str) -> None:
    policy = Serves(
        decide_first=lambda view: Plan(preempt=[Preemption(first(view), mode, queue)]) if view.decoding else None
    )
    with pytest.raises(AssertionError, match="expected mode"):
        simulated(policy, ContractWorld(REQUESTS))


@pytest.mark.parametrize("make", [
    lambda: Chunk(REQUESTS[0], -1), lambda: Chunk(REQUESTS[0], 1, -5), lambda: Plan(padding_rows=-1),
    lambda: Plan(hold=-1), lambda: Hold(-1), lambda: Hold(keep_free=-1),
])  # fmt: skip
def test_negative_counts_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected at least 0, got -"):
        make()
