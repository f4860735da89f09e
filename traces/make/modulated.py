"""Poisson arrivals whose rate depends on a state; a state lasts an exponential time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.core.limits import MAX_REQUESTS
from servesim.traces.random_streams import stream

Times = NDArray[np.float64]
MAX_STATES = 1_000_000  # changes of state until the last request


def modulated_rate(rates: list[float], means: list[float]) -> float:
    """Return the mean rate; all states occur equally often."""
    return sum(rate * mean for rate, mean in zip(rates, means)) / sum(means)


def modulated_times(count: int, seed: int, rates: list[float], means: list[float]) -> Times:
    """Return Poisson arrivals whose rate depends on the state; states have exponential durations."""
    check_states(count, rates, means)
    rng = stream(seed, "arrivals")
    state, now, total, times = 0, 0.0, 0, []
    while total < count:
        stay = rng.exponential(means[state])
        arrived = min(int(rng.poisson(rates[state] * stay)), MAX_REQUESTS)
        times.append(now + np.sort(rng.random(arrived)) * stay)
        total += arrived
        now += stay
        others = [other for other in range(len(rates)) if other != state]
        state = others[int(rng.integers(len(others)))]
    return np.asarray(np.concatenate(times)[:count], np.float64)


def check_states(count: int, rates: list[float], means: list[float]) -> None:
    """Raise BadInput if one state has too many requests, or too many states pass until the last request."""
    expected = [rate * mean for rate, mean in zip(rates, means)]
    if max(expected) > MAX_REQUESTS / 10:  # a state may last much longer than its mean
        raise BadInput(f"workload.arrivals: expected at most {MAX_REQUESTS // 10} requests per state (rate * seconds)")
    if count * len(expected) > MAX_STATES * sum(expected):
        raise BadInput(
            f"workload.arrivals: expected at most {MAX_STATES} changes of state until request {count}; "
            "use higher rates or longer states"
        )
