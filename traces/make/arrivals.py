"""When requests arrive: every kind of arrival process, its keys in a workload and how its times are drawn."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Union, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator, field_validator
from servesim.core import BadInput
from servesim.files import checked
from servesim.files.checked import KIND, AtLeast0, Finite, Keys, Maybe, Numbers, Positive, Whole
from servesim.traces.random_streams import stream

Times = NDArray[np.float64]
MOST = 20_000_000  # requests that a duration may come to: more is a mistake
Rate = Annotated[Positive, Field(description="requests a second, on average")]
Asked = Annotated[Positive, Field(description="requests a second that the contest's client is asked for")]
Dispatch = Annotated[AtLeast0, Field(description="seconds by which each gap is longer than drawn")]


class Process(Keys):
    """A way in which requests arrive."""

    def times(self, count: int, seed: int) -> Times:
        """Return the first `count` arrivals."""
        raise NotImplementedError

    def within(self, duration: float, seed: int) -> Times:
        """Return the arrivals before `duration`: ask for more until there are enough."""
        count = 1024
        while count <= MOST:
            times = self.times(count, seed)
            if times[-1] >= duration:
                return times[times < duration]
            count *= 4
        raise BadInput(f"workload.duration: expected less than {MOST} requests in {duration:g} s")


class Constant(Process):
    """One every 1/rate seconds, the first at 0."""

    kind: Annotated[Literal["constant"], KIND]
    rate: Rate

    def times(self, count: int, seed: int) -> Times:
        return np.arange(count) / self.rate


class Poisson(Process):
    """Exponential gaps: as many independent users make."""

    kind: Annotated[Literal["poisson"], KIND]
    rate: Rate

    def times(self, count: int, seed: int) -> Times:
        return np.cumsum(stream(seed, "arrivals").exponential(1 / self.rate, count))


class Gamma(Process):
    """Gamma gaps: burstiness 1 is Poisson, below it comes in bursts, above it evens out. CV = 1/sqrt(burstiness)."""

    either = (("burstiness",), ("cv",))
    kind: Annotated[Literal["gamma"], KIND]
    rate: Rate
    burstiness: Maybe[Positive] = Field(None, description="shape of the gaps' distribution, no unit")
    cv: Maybe[Positive] = Field(None, description="standard deviation of the gaps over their mean, no unit")

    def times(self, count: int, seed: int) -> Times:
        shape = self.cv**-2 if self.cv is not None else self.burstiness
        assert shape is not None
        return np.cumsum(stream(seed, "arrivals").gamma(shape, 1 / (self.rate * shape), count))


class Vllm(Process):
    """As `vllm bench serve --request-rate R --burstiness B`: gamma gaps, stretched to end at exactly count/rate."""

    kind: Annotated[Literal["vllm"], KIND]
    rate: Rate
    burstiness: Positive = Field(1.0, description="shape of the gaps' distribution, no unit")

    def times(self, count: int, seed: int) -> Times:
        # It draws from numpy's old global generator.
        chance = np.random.RandomState(seed % 2**32)
        times = np.cumsum(chance.gamma(self.burstiness, 1 / (self.rate * self.burstiness), count))
        return times * (count / self.rate / times[-1]) if times[-1] > 0 else times

    def within(self, duration: float, seed: int) -> Times:
        return self.times(max(1, int(duration * self.rate)), seed)


class ContestArrivals(Process):
    """As the contest's client at `-X X`."""

    kind: Annotated[Literal["contest"], KIND]
    X: Asked
    dispatch: Dispatch = 0.0

    def times(self, count: int, seed: int) -> Times:
        return contest_arrivals(count, self.X, seed, self.dispatch)


def contest_arrivals(count: int, X: float, seed: int, dispatch: float = 0.0) -> Times:
    """Return the moments at which the contest's client starts its threads, the first at 0."""
    interval = round(1 / X, 2)
    # numpy's old global generator is what the client draws from; it never seeds it.
    gaps = np.random.RandomState(seed % 2**32).poisson(interval * 1000, count)[: count - 1]
    sent = np.concatenate([[0], np.cumsum(gaps)])
    return np.asarray(sent / 1000 + dispatch * np.arange(count), np.float64)


class OnOff(Process):
    """Poisson at one rate for a while, then at another: a Markov-modulated process of two states, on first."""

    kind: Annotated[Literal["on-off"], KIND]
    on_rate: Positive = Field(description="requests a second while on")
    off_rate: AtLeast0 = Field(0.0, description="requests a second while off")
    on_seconds: Positive = Field(description="mean seconds that on lasts")
    off_seconds: Positive = Field(description="mean seconds that off lasts")

    def times(self, count: int, seed: int) -> Times:
        return modulated(count, seed, [self.on_rate, self.off_rate], [self.on_seconds, self.off_seconds])


class Mmpp(Process):
    """Poisson whose rate jumps between states, each kept for an exponential time; the next one is any of the others."""

    kind: Annotated[Literal["mmpp"], KIND]
    rates: Numbers = Field(description="requests a second in each state")
    seconds: Numbers = Field(description="mean seconds that each state lasts")

    @field_validator("rates")
    @classmethod
    def _any(cls, rates: list[float]) -> list[float]:
        if not max(rates) > 0:
            raise checked.expected("one above 0")
        return rates

    @field_validator("seconds")
    @classmethod
    def _matched(cls, seconds: list[float], info: ValidationInfo) -> list[float]:
        rates = info.data.get("rates", [])
        if len(rates) != len(seconds) or len(rates) < 2:
            raise checked.expected(f"as many as rates, at least 2 (rates has {len(rates)})")
        if not min(seconds) > 0:
            raise checked.expected("numbers above 0")
        return seconds

    def times(self, count: int, seed: int) -> Times:
        return modulated(count, seed, self.rates, self.seconds)


def modulated(count: int, seed: int, rates: list[float], means: list[float]) -> Times:
    """Return Poisson arrivals whose rate is that of the state; a state lasts its mean seconds on average."""
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


class Diurnal(Process):
    """Poisson whose rate swings about its mean as a cosine, highest at `peak`: day and night."""

    kind: Annotated[Literal["diurnal"], KIND]
    rate: Rate
    swing: Annotated[Finite, Field(ge=0, le=1), checked.says("a part of the mean rate, 0 to 1")] = Field(
        0.8, description="how far the rate goes from its mean, as a part of it"
    )
    period: Positive = Field(86400.0, description="seconds from one peak to the next")
    peak: AtLeast0 = Field(0.0, description="seconds at which the rate is highest")

    def times(self, count: int, seed: int) -> Times:
        expected = np.cumsum(stream(seed, "arrivals").exponential(1.0, count))
        turn = self.period / (2 * math.pi)
        # By time t, rate * (t + swing * turn * (sin((t - peak) / turn) + sin(peak / turn))) are expected: the inverse
        # gives the times. The grid depends on the period alone: more requests do not move the first ones.
        grid = np.arange(256 * math.ceil(expected[-1] / self.rate / self.period + 1) + 1) * (self.period / 256)
        waves = np.sin((grid - self.peak) / turn) + math.sin(self.peak / turn)
        return np.interp(expected, self.rate * (grid + self.swing * turn * waves), grid)


class Burst(Process):
    """All at once."""

    kind: Annotated[Literal["burst"], KIND]

    def times(self, count: int, seed: int) -> Times:
        return np.zeros(count)


class Closed(Process):
    """A closed loop: each of `users` sends its next request `think` seconds after the last was answered.

    Pauses are constant, or exponential about `think`; users start evenly over `ramp` seconds.
    """

    kind: Annotated[Literal["closed"], KIND]
    users: Whole = Field(description="users that send requests, each one at a time")
    think: AtLeast0 = Field(0.0, description="seconds from an answer to the user's next request")
    pauses: Annotated[Literal["constant", "exponential"], checked.says("one of constant, exponential")] = Field(
        "constant", description="how pauses are distributed"
    )
    ramp: AtLeast0 = Field(0.0, description="seconds over which users start")

    def times(self, count: int, seed: int) -> Times:
        return self.ramp * (np.arange(count) % self.users) / self.users

    def delays(self, count: int, seed: int) -> Times:
        """Return the pause before each request; a user's first request has none."""
        if self.pauses == "constant":
            delays: Times = np.full(count, self.think)
        else:
            delays = stream(seed, "pauses").exponential(self.think, count)
        delays[: self.users] = 0.0
        return delays


AnyProcess = Union[Constant, Poisson, Gamma, Vllm, ContestArrivals, OnOff, Mmpp, Diurnal, Burst, Closed]
ARRIVAL_KINDS = checked.kinds_of(*get_args(AnyProcess))


def arrivals_of(given: Any, inner: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Return the arrival process; one without a rate cannot fill a duration."""
    keys = checked.of_kind(given, ARRIVAL_KINDS)
    if isinstance(keys, (Burst, Closed)) and info.data.get("duration") is not None:
        raise BadInput(f"workload.requests: expected with arrivals of kind {keys.kind}, got duration")
    return keys


Arrivals = Annotated[AnyProcess, Field(discriminator="kind"), WrapValidator(arrivals_of)]
