"""Queueing theory: with batch 1 the simulator is a single-server queue, and its mean wait matches the formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from servesim.core import Request
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.llm_serving import LLMServing

LOAD = 0.7
CUSTOMERS = 40_000
BATCHES = 40


def mean_wait(services: np.ndarray, seed: int) -> tuple[float, float]:
    """Serve Poisson arrivals one by one; return the mean wait and the half-width of its 99 % confidence interval."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / LOAD, len(services)))
    tokens = np.maximum(1, np.rint(services * 1e6)).astype(int)  # a prompt of n tokens takes n microseconds
    requests = [Request(i, float(a), int(n), 1) for i, (a, n) in enumerate(zip(arrivals, tokens, strict=True))]
    policy = LLMServing(decode_batch=1)
    server = Server(policy, 10**9, 16)
    Loop(server, Inbox(requests), SimulatedClock(LinearCost(prefill_token=1e-6))).run()
    waits = np.array([request.queued for request in requests]).reshape(BATCHES, -1).mean(axis=1)
    half_width = 2.708 * waits.std(ddof=1) / math.sqrt(BATCHES)  # t of 39 degrees of freedom
    return float(waits.mean()), float(half_width)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_constant_service_times_match_m_d_1(seed: int) -> None:
    wait, half_width = mean_wait(np.ones(CUSTOMERS), seed)
    assert half_width < 0.25
    assert abs(wait - LOAD / (2 * (1 - LOAD))) < half_width


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_exponential_service_times_match_m_m_1(seed: int) -> None:
    services = np.random.default_rng(seed + 100).exponential(1.0, CUSTOMERS)
    wait, half_width = mean_wait(services, seed)
    assert half_width < 0.6
    assert abs(wait - LOAD / (1 - LOAD)) < half_width
