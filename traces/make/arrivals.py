"""When requests arrive: the kinds of arrival process a workload can name.

workload.py says what each kind is. Here it is a function of how many, the seed and its section of the workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.traces.random_streams import stream

from .contest import contest_arrivals
from .workload import (
    Arrival,
    Burst,
    Closed,
    Constant,
    ContestArrivals,
    Diurnal,
    Gamma,
    Mmpp,
    OnOff,
    Poisson,
    Vllm,
)

Times = NDArray[np.float64]


class Arrivals(NamedTuple):
    """Arrival times; in a closed loop, the user of each request and the pause before it."""

    times: Times
    users: Optional[NDArray[np.int64]] = None
    pauses: Optional[Times] = None


def arrivals(keys: Arrival, requests: Optional[int], duration: Optional[float], seed: int) -> Arrivals:
    """Return so many arrivals, or all those within `duration` seconds."""
    if requests is not None:
        return ARRIVALS[keys.kind](requests, seed, keys)
    assert duration is not None
    return Arrivals(_within(duration, seed, keys))


MOST = 20_000_000  # requests that a duration may come to: more is a slip of the pen


def _within(duration: float, seed: int, keys: Arrival) -> Times:
    """Return the arrivals before `duration`: ask for more until there are enough."""
    draw = ARRIVALS[keys.kind]
    if isinstance(keys, Vllm):
        return draw(max(1, int(duration * keys.rate)), seed, keys).times
    count = 1024
    while True:
        times = draw(count, seed, keys).times
        if times[-1] >= duration:
            return times[times < duration]
        count *= 4
        if count > MOST:
            raise BadInput(f"workload.duration: expected less than {MOST} requests in {duration:g} s")


def _constant(count: int, seed: int, keys: Constant) -> Arrivals:
    return Arrivals(np.arange(count) / keys.rate)


def _poisson(count: int, seed: int, keys: Poisson) -> Arrivals:
    return Arrivals(np.cumsum(stream(seed, "arrivals").exponential(1 / keys.rate, count)))


def _gamma(count: int, seed: int, keys: Gamma) -> Arrivals:
    shape = keys.cv**-2 if keys.cv is not None else keys.burstiness
    assert shape is not None
    return Arrivals(np.cumsum(stream(seed, "arrivals").gamma(shape, 1 / (keys.rate * shape), count)))


def _vllm(count: int, seed: int, keys: Vllm) -> Arrivals:
    rate, shape = keys.rate, keys.burstiness
    # It draws from numpy's old global generator.
    times = np.cumsum(np.random.RandomState(seed % 2**32).gamma(shape, 1 / (rate * shape), count))
    return Arrivals(times * (count / rate / times[-1]) if times[-1] > 0 else times)


def _contest(count: int, seed: int, keys: ContestArrivals) -> Arrivals:
    return Arrivals(contest_arrivals(count, keys.X, seed, keys.dispatch))


def _on_off(count: int, seed: int, keys: OnOff) -> Arrivals:
    return Arrivals(_modulated(count, seed, [keys.on_rate, keys.off_rate], [keys.on_seconds, keys.off_seconds]))


def _mmpp(count: int, seed: int, keys: Mmpp) -> Arrivals:
    return Arrivals(_modulated(count, seed, keys.rates, keys.seconds))


def _modulated(count: int, seed: int, rates: list[float], means: list[float]) -> Times:
    chance = stream(seed, "arrivals")
    state, now, found, parts = 0, 0.0, 0, []
    while found < count:
        stay = chance.exponential(means[state])
        arrived = min(int(chance.poisson(rates[state] * stay)), MOST)
        parts.append(now + np.sort(chance.random(arrived)) * stay)
        found += arrived
        now += stay
        others = [other for other in range(len(rates)) if other != state]
        state = others[int(chance.integers(len(others)))]
    return np.asarray(np.concatenate(parts)[:count], np.float64)


def _diurnal(count: int, seed: int, keys: Diurnal) -> Arrivals:
    rate, swing, period, peak = keys.rate, keys.swing, keys.period, keys.peak
    expected = np.cumsum(stream(seed, "arrivals").exponential(1.0, count))
    turn = period / (2 * math.pi)
    # By time t, rate * (t + swing * turn * (sin((t - peak) / turn) + sin(peak / turn))) are expected: turn that around.
    # The grid is that of the period alone, so that asking for more requests does not move the first ones.
    grid = np.arange(256 * math.ceil(expected[-1] / rate / period + 1) + 1) * (period / 256)
    by_then = rate * (grid + swing * turn * (np.sin((grid - peak) / turn) + math.sin(peak / turn)))
    return Arrivals(np.interp(expected, by_then, grid))


def _burst(count: int, seed: int, keys: Burst) -> Arrivals:
    return Arrivals(np.zeros(count))


def _closed(count: int, seed: int, keys: Closed) -> Arrivals:
    user = np.arange(count) % keys.users
    if keys.pauses == "constant":
        pauses: Times = np.full(count, keys.think)
    else:
        pauses = stream(seed, "pauses").exponential(keys.think, count)
    pauses[: keys.users] = 0.0
    return Arrivals(keys.ramp * user / keys.users, user, pauses)


ARRIVALS: dict[str, Callable[[int, int, Any], Arrivals]] = {
    "constant": _constant,
    "poisson": _poisson,
    "gamma": _gamma,
    "vllm": _vllm,
    "contest": _contest,
    "on-off": _on_off,
    "mmpp": _mmpp,
    "diurnal": _diurnal,
    "burst": _burst,
    "closed": _closed,
}
