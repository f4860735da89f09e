"""Load tests in stages: each stage has a mean rate and a duration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from servesim.files.checked import Keys, PositiveSeconds, RequestRate0, expects, invalid_error
from servesim.traces.random_streams import stream

Times = NDArray[np.float64]


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
