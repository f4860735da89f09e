"""Queueing theory of fleets: with one request at a time per replica, mean waits agree with closed forms.

The mean service time is 1 and every replica has the same load. Where no closed form is known, the figures are those of
an independent simulation with its standard error, and the order of the routers must hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from servesim.core import Request
from servesim.costs.linear import LinearCost
from servesim.engine.fleet import Fleet
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.replica import Replica
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.llm_serving import LLMServing
from servesim.routers import ROUTERS, Asked, Router
from servesim.routers import Fleet as View
from servesim.routers.router import least

CUSTOMERS = 20_000
BATCHES = 20
STEP = 0.01  # seconds of a decode step
PROMPTS, STEPS = LinearCost(prefill_token=1e-6), LinearCost(decode_step=STEP)
T = 2.861  # 99 % of a t distribution with 19 degrees of freedom


class Wait(NamedTuple):
    """A mean wait and the half-width of its 99 % confidence interval."""

    mean: float
    half_width: float


def poisson(rate: float, services: np.ndarray, seed: int) -> list[Request]:
    """Return requests whose prompt of n tokens takes n microseconds."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(services)))
    tokens = np.maximum(1, np.rint(services * 1e6)).astype(int)
    return [Request(i, float(a), int(n), 1) for i, (a, n) in enumerate(zip(arrivals, tokens))]


def exponential(seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 100).exponential(1.0, CUSTOMERS)


def in_steps(rate: float, customers: int, seed: int) -> list[Request]:
    """Return requests that decode a number of steps; a geometric number has no memory, as an exponential time."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, customers))
    steps = rng.geometric(STEP, customers)
    return [Request(i, float(a), 1, int(n)) for i, (a, n) in enumerate(zip(arrivals, steps))]


def loop_of(requests: list[Request], slots: int, cost: LinearCost) -> Loop:
    return Loop(Server(LLMServing(decode_batch=slots), 10**9, 16), Inbox(requests), SimulatedClock(cost))


def one_by_one(cost: LinearCost) -> Replica:
    """Return a replica that serves one request at a time."""
    loop = loop_of([], 1, cost)
    return Replica(loop)


def ask(request: Request) -> Asked:
    return Asked(request.id, "", request.prompt)


def mean_wait(router: Router, replicas: int, load: float, services: np.ndarray, seed: int) -> Wait:
    """Serve Poisson arrivals with a fleet."""
    requests = poisson(load * replicas, services, seed)
    Fleet([one_by_one(PROMPTS) for _ in range(replicas)], router, requests, ask, seed, 0.0).run()
    return wait_of(requests)


def wait_of(requests: list[Request]) -> Wait:
    waits = np.array([request.queued for request in requests]).reshape(BATCHES, -1).mean(axis=1)
    return Wait(float(waits.mean()), T * float(waits.std(ddof=1)) / math.sqrt(BATCHES))


@cache
def wait_in_fleet(router: str) -> Wait:
    """Return the wait at four replicas with load 0.8 and exponential service."""
    return mean_wait(ROUTERS[router](), 4, 0.8, exponential(5), 5)


@cache
def wait_in_central_queue() -> Wait:
    """Return the wait at one server with four slots, whose steps cost the same for any number of rows."""
    requests = in_steps(3.2, CUSTOMERS, 7)
    loop_of(requests, 4, STEPS).run()
    return wait_of(requests)


def round_robin_wait(replicas: int, load: float) -> float:
    """Return the wait of an E_c/M/1 queue."""
    sigma = 0.5
    for _ in range(1000):
        sigma = (replicas * load / (replicas * load + 1 - sigma)) ** replicas
    return sigma / (1 - sigma)


def test_the_formula_of_round_robin_has_the_published_values() -> None:
    assert round_robin_wait(4, 0.8) == pytest.approx(2.267384, rel=1e-6)
    assert round_robin_wait(2, 0.9) == pytest.approx(6.588284, rel=1e-6)


@pytest.mark.parametrize(
    ("router", "expected"),
    [("random", 4.0), ("round-robin", 2.267384), ("least-requests", 0.969), ("power-of-two", 1.330)],
)
def test_exponential_service(router: str, expected: float) -> None:
    wait = wait_in_fleet(router)
    assert wait.half_width < 0.35 * expected
    assert abs(wait.mean - expected) < wait.half_width


def test_a_central_queue_matches_m_m_c() -> None:
    wait = wait_in_central_queue()
    assert wait.half_width < 0.2
    assert abs(wait.mean - 0.745541) < wait.half_width


def test_the_order_of_the_routers() -> None:
    routers = ("least-requests", "power-of-two", "round-robin", "random")
    waits = [wait_in_central_queue().mean, *(wait_in_fleet(router).mean for router in routers)]
    assert waits == sorted(waits)


def test_random_splitting_of_constant_service_matches_m_d_1() -> None:
    wait = mean_wait(ROUTERS["random"](), 4, 0.8, np.ones(CUSTOMERS), 6)
    assert wait.half_width < 0.5
    assert abs(wait.mean - 2.0) < wait.half_width


def test_round_robin_of_constant_service_and_even_arrivals_has_no_wait() -> None:
    requests = [Request(i, i / 4, 1_000_000, 1) for i in range(100)]
    Fleet([one_by_one(PROMPTS) for _ in range(4)], ROUTERS["round-robin"](), requests, ask, 0, 0.0).run()
    assert wait_of(requests).mean == 0.0


@dataclass(frozen=True)
class LeastReported(Router):
    """The fewest requests by the last reports, which nothing alters."""

    def choices(self, request: Asked, fleet: View) -> list[int]:
        return least([replica.waiting + replica.running for replica in fleet.memory.reported], fleet.present)


@dataclass(frozen=True)
class TwoReported(LeastReported):
    """The better one of two by their last reports."""

    def route(self, request: Asked, fleet: View, random: Random) -> int:
        pair = View(fleet.now, random.sample(list(fleet.present), 2), fleet.memory)
        return random.choice(self.choices(request, pair))


def stale_wait(router: Router, staleness: float) -> float:
    """Return the mean wait at eight replicas with load 0.9, whose counts are as old as this."""
    requests = in_steps(7.2, 8000, 9)
    Fleet([one_by_one(STEPS) for _ in range(8)], router, requests, ask, 9, staleness).run()
    return wait_of(requests).mean


def test_with_old_counts_the_shortest_queue_loses_to_the_better_one_of_two() -> None:
    new, old = ([stale_wait(router, age) for router in (LeastReported(), TwoReported())] for age in (0.2, 5.0))
    assert new[0] < new[1] < old[1] < old[0]
    assert old[0] > 2 * old[1]
