"""When requests arrive: the kinds of arrival process a workload can name.

Rates are requests a second. A kind is a function of how many, the seed and its section of the workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.traces.random_streams import stream

from .contest import contest_arrivals
from .section import Section

Times = NDArray[np.float64]


class Arrivals(NamedTuple):
    """Arrival times; in a closed loop, the user of each request and the pause before it."""

    times: Times
    users: Optional[NDArray[np.int64]] = None
    pauses: Optional[Times] = None


class Kind(NamedTuple):
    """An arrival process, and the keys of its section."""

    draw: Callable[[int, int, Section], Arrivals]
    keys: tuple[str, ...]


def arrivals(section: Section, requests: Optional[int], duration: Optional[float], seed: int) -> Arrivals:
    """Return so many arrivals, or all those within `duration` seconds."""
    kind = ARRIVALS[section.choice("kind", ARRIVALS)]
    section.only(("kind", *kind.keys))
    if requests is not None:
        return kind.draw(requests, seed, section)
    if kind.draw in (burst, closed):
        raise BadInput(f"workload.requests: expected with arrivals of kind {section.values['kind']}, got duration")
    assert duration is not None
    return Arrivals(_within(duration, kind, seed, section))


MOST = 20_000_000  # requests that a duration may come to: more is a slip of the pen


def _within(duration: float, kind: Kind, seed: int, section: Section) -> Times:
    """Return the arrivals before `duration`: ask for more until there are enough."""
    if kind.draw is vllm:
        return kind.draw(max(1, int(duration * section.positive("rate"))), seed, section).times
    count = 1024
    while True:
        times = kind.draw(count, seed, section).times
        if times[-1] >= duration:
            return times[times < duration]
        count *= 4
        if count > MOST:
            raise BadInput(f"workload.duration: expected less than {MOST} requests in {duration:g} s")


def constant(count: int, seed: int, keys: Section) -> Arrivals:
    """One every 1/rate seconds, the first at 0."""
    return Arrivals(np.arange(count) / keys.positive("rate"))


def poisson(count: int, seed: int, keys: Section) -> Arrivals:
    """Exponential gaps: as many independent users make."""
    return Arrivals(np.cumsum(stream(seed, "arrivals").exponential(1 / keys.positive("rate"), count)))


def gamma(count: int, seed: int, keys: Section) -> Arrivals:
    """Gamma gaps: burstiness 1 is Poisson, below it comes in bursts, above it evens out. CV = 1/sqrt(burstiness)."""
    if ("cv" in keys) == ("burstiness" in keys):
        raise BadInput(f"{keys.where}: expected one of burstiness and cv")
    shape = keys.positive("burstiness") if "burstiness" in keys else keys.positive("cv") ** -2
    return Arrivals(np.cumsum(stream(seed, "arrivals").gamma(shape, 1 / (keys.positive("rate") * shape), count)))


def vllm(count: int, seed: int, keys: Section) -> Arrivals:
    """As `vllm bench serve --request-rate R --burstiness B`: gamma gaps, stretched to end at exactly count/rate."""
    rate, shape = keys.positive("rate"), keys.positive("burstiness", 1.0)
    # It draws from numpy's old global generator.
    times = np.cumsum(np.random.RandomState(seed % 2**32).gamma(shape, 1 / (rate * shape), count))
    return Arrivals(times * (count / rate / times[-1]) if times[-1] > 0 else times)


def contest(count: int, seed: int, keys: Section) -> Arrivals:
    """As the contest's client at `-X X`."""
    return Arrivals(contest_arrivals(count, keys.positive("X"), seed, keys.number("dispatch", 0.0)))


def on_off(count: int, seed: int, keys: Section) -> Arrivals:
    """Poisson at one rate for a while, then at another: a Markov-modulated process of two states, on first."""
    rates = [keys.positive("on_rate"), keys.number("off_rate", 0.0)]
    return Arrivals(_modulated(count, seed, rates, [keys.positive("on_seconds"), keys.positive("off_seconds")]))


def mmpp(count: int, seed: int, keys: Section) -> Arrivals:
    """Poisson whose rate jumps between states, each kept for an exponential time; the next one is any of the others."""
    rates, means = keys.numbers("rates"), keys.numbers("seconds")
    if len(rates) != len(means) or len(rates) < 2:
        raise keys.bad("seconds", f"as many as rates, at least 2 (rates has {len(rates)})")
    if not max(rates) > 0:
        raise keys.bad("rates", "one above 0")
    if not min(means) > 0:
        raise keys.bad("seconds", "numbers above 0")
    return Arrivals(_modulated(count, seed, rates, means))


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


def diurnal(count: int, seed: int, keys: Section) -> Arrivals:
    """Poisson whose rate swings about its mean as a cosine, highest at `peak`: day and night."""
    rate, swing = keys.positive("rate"), keys.number("swing", 0.8)
    period, peak = keys.positive("period", 86400.0), keys.number("peak", 0.0)
    if swing > 1:
        raise keys.bad("swing", "a part of the mean rate, 0 to 1")
    expected = np.cumsum(stream(seed, "arrivals").exponential(1.0, count))
    turn = period / (2 * math.pi)
    # By time t, rate * (t + swing * turn * (sin((t - peak) / turn) + sin(peak / turn))) are expected: turn that around.
    # The grid is that of the period alone, so that asking for more requests does not move the first ones.
    grid = np.arange(256 * math.ceil(expected[-1] / rate / period + 1) + 1) * (period / 256)
    by_then = rate * (grid + swing * turn * (np.sin((grid - peak) / turn) + math.sin(peak / turn)))
    return Arrivals(np.interp(expected, by_then, grid))


def burst(count: int, seed: int, keys: Section) -> Arrivals:
    """All at once."""
    return Arrivals(np.zeros(count))


def closed(count: int, seed: int, keys: Section) -> Arrivals:
    """A closed loop: each of `users` sends its next request `think` seconds after the last was answered.

    Pauses are constant, or exponential about `think`; users start evenly over `ramp` seconds.
    """
    users, think, ramp = keys.whole("users"), keys.number("think", 0.0), keys.number("ramp", 0.0)
    user = np.arange(count) % users
    if keys.choice("pauses", ("constant", "exponential"), "constant") == "constant":
        pauses: Times = np.full(count, think)
    else:
        pauses = stream(seed, "pauses").exponential(think, count)
    pauses[:users] = 0.0
    return Arrivals(ramp * user / users, user, pauses)


ARRIVALS: dict[str, Kind] = {
    "constant": Kind(constant, ("rate",)),
    "poisson": Kind(poisson, ("rate",)),
    "gamma": Kind(gamma, ("rate", "burstiness", "cv")),
    "vllm": Kind(vllm, ("rate", "burstiness")),
    "contest": Kind(contest, ("X", "dispatch")),
    "on-off": Kind(on_off, ("on_rate", "off_rate", "on_seconds", "off_seconds")),
    "mmpp": Kind(mmpp, ("rates", "seconds")),
    "diurnal": Kind(diurnal, ("rate", "swing", "period", "peak")),
    "burst": Kind(burst, ()),
    "closed": Kind(closed, ("users", "think", "pauses", "ramp")),
}
