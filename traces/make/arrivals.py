"""Arrival processes: the keys of each kind in a workload, and its random arrival times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from servesim.core import BadInput
from servesim.core.limits import MAX_BURSTINESS, MAX_CV, MAX_REQUESTS, MIN_BURSTINESS, MIN_CV
from servesim.files import checked
from servesim.files.checked import (
    KIND,
    AnyPositive,
    Finite,
    Keys,
    Limits,
    Maybe,
    PositiveSeconds,
    RequestRate,
    RequestRate0,
    Seconds,
    Whole,
    expects,
    invalid_error,
)
from servesim.traces.trace import stream

Times = NDArray[np.float64]
MAX_STATES = 1_000_000  # changes of state until the last request


class Stage(Keys):
    """A part of a load test with one mean rate."""

    rate: RequestRate0 = Field(description="mean requests per second; 0 is a pause")
    seconds: PositiveSeconds = Field(description="duration of the stage, seconds")


def check_stages(stages: list[Stage]) -> list[Stage]:
    """Raise an error if no request arrives in any stage."""
    if not max(stage.rate for stage in stages) > 0:
        raise invalid_error("expected at least one stage with a rate above 0")
    return stages


StageList = Annotated[
    list[Stage],
    Field(min_length=1, description="stages in order, each with a rate and its seconds"),
    expects("a list of {rate, seconds}"),
    AfterValidator(check_stages),
]
Gaps = Annotated[
    Literal["poisson", "constant"],
    Field(description="gaps between the requests of a stage: poisson or constant"),
    expects("one of poisson, constant"),
]


def expected_requests(stages: Sequence[Stage]) -> tuple[Times, Times]:
    """Return the expected number of requests at the start and after each stage, and these points in time."""
    rates, seconds = np.array([(stage.rate, stage.seconds) for stage in stages]).T
    return np.concatenate([[0.0], np.cumsum(rates * seconds)]), np.concatenate([[0.0], np.cumsum(seconds)])


def staged_times(stages: Sequence[Stage], gaps: str, count: int, seed: int) -> Times:
    """Return the first `count` arrival times, fewer if the stages have fewer."""
    expected, ends = expected_requests(stages)
    if gaps == "constant":
        numbers = np.arange(count, dtype=np.float64)
    else:
        numbers = np.cumsum(stream(seed, "arrivals").exponential(1.0, count))
    times: Times = np.interp(numbers[numbers < expected[-1]], expected, ends)
    return times


MAX_PERIODS = 10_000  # of a diurnal process until the last request
Rate = Annotated[RequestRate, Field(description="mean requests per second")]
ContestRate = Annotated[RequestRate, Field(description="requests per second, option -X of the contest's client")]
SendOverhead = Annotated[Seconds, Field(description="seconds that the client adds to each gap")]
Burstiness = Annotated[AnyPositive, Limits(MIN_BURSTINESS, MAX_BURSTINESS)]
Variation = Annotated[AnyPositive, Limits(MIN_CV, MAX_CV)]


class Process(Keys):
    """An arrival process."""

    def times(self, count: int, seed: int) -> Times:
        """Return the first `count` arrival times."""
        raise NotImplementedError

    def mean_rate(self) -> float:
        """Return the mean requests per second."""
        rate: float = getattr(self, "rate", 0.0)
        return rate

    def within(self, duration: float, seed: int) -> Times:
        """Return the arrival times before `duration`; draws more until there are enough."""
        count = 1024 if self.mean_rate() * duration < 2 * MAX_REQUESTS else MAX_REQUESTS + 1
        while count <= MAX_REQUESTS:
            times = self.times(count, seed)
            if times[-1] >= duration:
                return times[times < duration]
            count *= 4
        raise too_many_requests(duration)


def too_many_requests(duration: float) -> BadInput:
    """Return the error for a duration with more requests than a workload may have."""
    return BadInput(f"workload.duration: expected fewer than {MAX_REQUESTS} requests in {duration:g} s")


class Constant(Process):
    """One request every 1/rate seconds, the first at 0."""

    kind: Annotated[Literal["constant"], KIND]
    rate: Rate

    def times(self, count: int, seed: int) -> Times:
        return np.arange(count) / self.rate


class Poisson(Process):
    """Exponential gaps: many independent users."""

    kind: Annotated[Literal["poisson"], KIND]
    rate: Rate

    def times(self, count: int, seed: int) -> Times:
        return np.cumsum(stream(seed, "arrivals").exponential(1 / self.rate, count))


class Gamma(Process):
    """Gamma gaps. Burstiness 1 is Poisson; below 1 is burstier, above 1 is more even. CV = 1/sqrt(burstiness)."""

    either = (("burstiness",), ("cv",))
    kind: Annotated[Literal["gamma"], KIND]
    rate: Rate
    burstiness: Maybe[Burstiness] = Field(None, description="shape parameter of the gamma distribution, no unit")
    cv: Maybe[Variation] = Field(
        None, description="coefficient of variation: standard deviation of the gaps / mean, no unit"
    )

    def times(self, count: int, seed: int) -> Times:
        shape = self.cv**-2 if self.cv is not None else self.burstiness
        assert shape is not None
        return np.cumsum(stream(seed, "arrivals").gamma(shape, 1 / (self.rate * shape), count))


class Vllm(Process):
    """As `vllm bench serve --request-rate R --burstiness B`: gamma gaps, scaled to end at exactly count/rate."""

    kind: Annotated[Literal["vllm"], KIND]
    rate: Rate
    burstiness: Burstiness = Field(1.0, description="shape parameter of the gamma distribution, no unit")

    def times(self, count: int, seed: int) -> Times:
        # vLLM uses numpy's old global generator.
        rng = np.random.RandomState(seed % 2**32)
        times = np.cumsum(rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness), count))
        return times * (count / self.rate / times[-1]) if times[-1] > 0 else times

    def within(self, duration: float, seed: int) -> Times:
        count = max(1, int(duration * self.rate))
        if count > MAX_REQUESTS:
            raise too_many_requests(duration)
        return self.times(count, seed)


class ContestArrivals(Process):
    """As the contest's client with `-X X`."""

    kind: Annotated[Literal["contest"], KIND]
    X: ContestRate
    send_overhead: SendOverhead = 0.0

    def mean_rate(self) -> float:
        gap = round(1 / self.X, 2) + self.send_overhead
        return 1 / gap if gap else math.inf

    def times(self, count: int, seed: int) -> Times:
        return contest_arrivals(count, self.X, seed, self.send_overhead)


def contest_arrivals(count: int, X: float, seed: int, send_overhead: float = 0.0) -> Times:
    """Return the times at which the contest's client starts its threads, the first at 0."""
    interval = round(1 / X, 2)
    # The client uses numpy's old global generator and never seeds it.
    gaps = np.random.RandomState(seed % 2**32).poisson(interval * 1000, count)[: count - 1]
    sent = np.concatenate([[0], np.cumsum(gaps)])
    return np.asarray(sent / 1000 + send_overhead * np.arange(count), np.float64)


class Modulated(Process):
    """Poisson arrivals whose rate depends on a state. States have exponential durations and occur equally often."""

    @property
    def states(self) -> list[tuple[float, float]]:
        """Requests per second and mean seconds of each state; the first one is that of the start."""
        raise NotImplementedError

    def mean_rate(self) -> float:
        return sum(rate * mean for rate, mean in self.states) / sum(mean for _, mean in self.states)

    def times(self, count: int, seed: int) -> Times:
        states = self.states
        check_states(count, [rate * mean for rate, mean in states])
        rng = stream(seed, "arrivals")
        state, now, total, times = 0, 0.0, 0, []
        while total < count:
            rate, mean = states[state]
            stay = rng.exponential(mean)
            arrived = min(int(rng.poisson(rate * stay)), MAX_REQUESTS)
            times.append(now + np.sort(rng.random(arrived)) * stay)
            total += arrived
            now += stay
            others = [other for other in range(len(states)) if other != state]
            state = others[int(rng.integers(len(others)))]
        return np.asarray(np.concatenate(times)[:count], np.float64)


def check_states(count: int, expected: Sequence[float]) -> None:
    """Raise BadInput if a state is expected to have too many requests, or too many states pass until the last one."""
    if max(expected) > MAX_REQUESTS / 10:  # a state may last much longer than its mean
        raise BadInput(f"workload.arrivals: expected at most {MAX_REQUESTS // 10} requests per state (rate * seconds)")
    if count * len(expected) > MAX_STATES * sum(expected):
        raise BadInput(
            f"workload.arrivals: expected at most {MAX_STATES} changes of state until request {count}; "
            "use higher rates or longer states"
        )


class OnOff(Modulated):
    """Poisson arrivals that switch between two rates: a Markov-modulated process with two states, on first."""

    kind: Annotated[Literal["on-off"], KIND]
    on_rate: RequestRate = Field(description="requests per second in state on")
    off_rate: RequestRate0 = Field(0.0, description="requests per second in state off")
    on_seconds: PositiveSeconds = Field(description="mean duration of state on, seconds")
    off_seconds: PositiveSeconds = Field(description="mean duration of state off, seconds")

    @property
    def states(self) -> list[tuple[float, float]]:
        return [(self.on_rate, self.on_seconds), (self.off_rate, self.off_seconds)]


Rates = Annotated[list[RequestRate0], Field(min_length=1), checked.expects("a list of numbers of at least 0")]
Durations = Annotated[list[Seconds], Field(min_length=1), checked.expects("a list of numbers of at least 0")]


class Mmpp(Modulated):
    """Poisson arrivals whose rate depends on a state. States last an exponential time; the next one is random."""

    kind: Annotated[Literal["mmpp"], KIND]
    rates: Rates = Field(description="requests per second in each state")
    seconds: Durations = Field(description="mean duration of each state, seconds")

    @field_validator("rates")
    @classmethod
    def _any(cls, rates: list[float]) -> list[float]:
        if not max(rates) > 0:
            raise checked.expected_error("at least one number above 0")
        return rates

    @field_validator("seconds")
    @classmethod
    def _matched(cls, seconds: list[float], info: ValidationInfo) -> list[float]:
        rates = info.data.get("rates", [])
        if len(rates) != len(seconds) or len(rates) < 2:
            raise checked.expected_error(f"one number per rate, at least 2 (rates has {len(rates)})")
        if not min(seconds) > 0:
            raise checked.expected_error("numbers above 0")
        return seconds

    @property
    def states(self) -> list[tuple[float, float]]:
        return list(zip(self.rates, self.seconds))


class Diurnal(Process):
    """Poisson arrivals whose rate follows a cosine, highest at `peak`: day and night."""

    kind: Annotated[Literal["diurnal"], KIND]
    rate: Rate
    amplitude: Annotated[Finite, Field(ge=0, le=1), checked.expects("a fraction of the mean rate, 0 to 1")] = Field(
        0.8, description="largest deviation of the rate from its mean, as a fraction of the mean"
    )
    period: PositiveSeconds = Field(86400.0, description="seconds between two peaks")
    peak: Seconds = Field(0.0, description="time of the highest rate, seconds")

    def times(self, count: int, seed: int) -> Times:
        expected = np.cumsum(stream(seed, "arrivals").exponential(1.0, count))
        if expected[-1] > MAX_PERIODS * self.rate * self.period:
            raise BadInput(f"workload.arrivals.period: expected at most {MAX_PERIODS} periods until request {count}")
        radian = self.period / (2 * math.pi)
        # Arrivals expected by t: rate * (t + amplitude * radian * (sin((t - peak) / radian) + sin(peak / radian))).
        # The inverse gives the times. The grid depends on the period only: more requests do not move the first ones.
        grid = np.arange(256 * math.ceil(expected[-1] / self.rate / self.period + 1) + 1) * (self.period / 256)
        waves = np.sin((grid - self.peak) / radian) + math.sin(self.peak / radian)
        return np.interp(expected, self.rate * (grid + self.amplitude * radian * waves), grid)


class Stages(Process):
    """Stages of a load test, one after the other, each with its own mean rate. Gaps are Poisson or constant."""

    kind: Annotated[Literal["stages"], KIND]
    stages: StageList
    gaps: Gaps = "poisson"

    def mean_rate(self) -> float:
        expected, ends = expected_requests(self.stages)
        return float(expected[-1] / ends[-1])

    def times(self, count: int, seed: int) -> Times:
        times = staged_times(self.stages, self.gaps, count, seed)
        if len(times) < count:
            raise BadInput(f"workload.requests: expected at most {len(times)}, the requests of all stages, got {count}")
        return times

    def within(self, duration: float, seed: int) -> Times:
        expected, ends = expected_requests(self.stages)
        count = np.interp(duration, ends, expected)
        if count > MAX_REQUESTS:
            raise too_many_requests(duration)
        times = staged_times(self.stages, self.gaps, int(count + 10 * math.sqrt(count) + 100), seed)
        return times[times < duration]


class Burst(Process):
    """All requests arrive at time 0."""

    kind: Annotated[Literal["burst"], KIND]

    def times(self, count: int, seed: int) -> Times:
        return np.zeros(count)


Pauses = Annotated[
    Literal["constant", "exponential"],
    Field(description="distribution of the pauses: constant or exponential"),
    checked.expects("one of constant, exponential"),
]


def draw_pauses(kind: str, mean: float, count: int, seed: int) -> Times:
    """Return pauses in seconds."""
    if kind == "constant":
        return np.full(count, mean)
    return stream(seed, "pauses").exponential(mean, count)


class Closed(Process):
    """A closed loop: each of `users` sends its next request `think_time` seconds after the last response.

    Pauses are constant, or exponential with mean `think_time`. Users start evenly over `ramp` seconds.
    """

    kind: Annotated[Literal["closed"], KIND]
    users: Whole = Field(description="number of users; each has one open request")
    think_time: Seconds = Field(0.0, description="seconds from a response to the next request of the user")
    pauses: Pauses = "constant"
    ramp: Seconds = Field(0.0, description="seconds until all users have started")

    def times(self, count: int, seed: int) -> Times:
        return self.ramp * (np.arange(count) % self.users) / self.users

    def delays(self, count: int, seed: int) -> Times:
        """Return the pause before each request; a user's first request has none."""
        delays = draw_pauses(self.pauses, self.think_time, count, seed)
        delays[: self.users] = 0.0
        return delays


AnyProcess = Union[Constant, Poisson, Gamma, Vllm, ContestArrivals, OnOff, Mmpp, Diurnal, Stages, Burst, Closed]
ARRIVAL_KINDS = checked.models_by_kind(*get_args(AnyProcess))


def arrivals_of(section: Any, info: ValidationInfo) -> Any:
    """Return the arrival process; a process without a rate needs `requests` instead of `duration`."""
    keys = checked.validate_kind(section, ARRIVAL_KINDS)
    if isinstance(keys, (Burst, Closed)) and info.data.get("duration") is not None:
        raise BadInput(
            f"workload.duration: not possible with arrivals of kind {keys.kind}; set workload.requests instead"
        )
    return keys


Arrivals = Annotated[AnyProcess, checked.Selected(Annotated[AnyProcess, Field(discriminator="kind")], arrivals_of)]
