"""The `workload` section of a scenario as pydantic models. synth.py generates the requests.

    requests: 1000                                  # or duration: 600, seconds
    arrivals: {kind: poisson, rate: 8.2}            # arrivals.py has the kinds
    lengths:                                        # lengths.py has the kinds
      kind: lognormal
      prompt: {mean: 265, sd: 300}
      output: {mean: 255, sd: 200, max: 2048}
    limit: 2048                                     # output limit, tokens (default: the output length)
    priorities: {0: 0.9, 1: 0.1}                    # priority -> fraction of the requests
    prefixes: {count: 20, tokens: 1500, zipf: 1.1}  # system prompts; texts.py has the keys
    sessions: {turns: [1, 8], think_time: 20}       # conversations

Two shorter forms replace `requests` or `duration` and `arrivals`:

    stages: [{rate: 8, seconds: 600}, {rate: 20, seconds: 600}]
    lengths: {...}

    concurrency: 64                                 # a closed loop: a new request when one ends
    requests: 640
    lengths: {...}

or `contest: {X: 0.5, T: 3000}`, or `mix: [...]`: several such workloads at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Union

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, WrapValidator
from servesim.core import BadInput
from servesim.core.limits import MAX_INT, MAX_REQUESTS, MIN_NUMBER
from servesim.files.checked import (
    AtLeast0,
    Keys,
    Maybe,
    Positive,
    PositiveSeconds,
    Text,
    Whole,
    WholeUpTo,
    expects,
    first_error,
    invalid_error,
)

from .arrivals import Arrivals, Closed, ContestRate, Gaps, SendOverhead, StageList, Stages
from .lengths import Lengths
from .texts import Prefixes, Sessions


def level(value: Any) -> Any:
    """Return a priority as a number; JSON keys are always text."""
    return int(value) if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal() else value


Priority = Annotated[
    int,
    Field(strict=True, ge=-MAX_INT, le=MAX_INT),
    BeforeValidator(level),
    expects("whole numbers for priorities"),
]
Count = Annotated[int, WholeUpTo(MAX_REQUESTS)]


def check_fractions(fractions: dict[int, float]) -> dict[int, float]:
    """Raise an error if all fractions are 0."""
    if not sum(fractions.values()) >= MIN_NUMBER:
        raise invalid_error("expected fractions with a sum above 0")
    return fractions


RequestLengths = Annotated[Lengths, Field(description="prompt and output lengths, tokens")]
OutputLimit = Annotated[Maybe[Whole], Field(description="output limit, tokens (default: the output length)")]
Priorities = Annotated[
    Maybe[Annotated[dict[Priority, AtLeast0], AfterValidator(check_fractions)]],
    Field(description="fraction of the requests for each priority; the sum need not be 1"),
]


def check_sessions(sessions: Sessions, info: ValidationInfo) -> Sessions:
    """Raise an error for a think time in a closed loop, whose users have their own."""
    if sessions.think_time and ("concurrency" in info.data or isinstance(info.data.get("arrivals"), Closed)):
        raise BadInput(
            "workload.sessions.think_time: not possible in a closed loop; use arrivals of kind closed with think_time"
        )
    return sessions


SharedPrefixes = Annotated[
    Maybe[Prefixes], Field(description="texts at the beginning of prompts, for example system prompts")
]
Conversations = Annotated[
    Maybe[Annotated[Sessions, AfterValidator(check_sessions)]],
    Field(description="conversations; `lengths.prompt` is then the new text of a turn"),
]


class Requests(Keys):
    """Requests from an arrival process and length distributions."""

    either = (("requests",), ("duration",))
    others = ("stages", "concurrency", "contest", "mix")
    requests: Maybe[Count] = Field(None, description="number of requests (or set duration)")
    duration: Maybe[PositiveSeconds] = Field(None, description="seconds of arrivals (or set requests)")
    arrivals: Arrivals = Field(description="arrival process")
    lengths: RequestLengths
    limit: OutputLimit = None
    priorities: Priorities = None
    prefixes: SharedPrefixes = None
    sessions: Conversations = None


class StagedRequests(Keys):
    """A load test in stages, each with its own rate; all requests of all stages."""

    stages: StageList
    gaps: Gaps = "poisson"
    lengths: RequestLengths
    limit: OutputLimit = None
    priorities: Priorities = None
    prefixes: SharedPrefixes = None
    sessions: Conversations = None

    @property
    def requests(self) -> None:
        """The number of requests follows from the stages."""

    @property
    def duration(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def arrivals(self) -> Stages:
        return Stages(kind="stages", stages=self.stages, gaps=self.gaps)


class ClosedRequests(Keys):
    """A closed loop: `concurrency` requests are open at any time, and a new one is sent when one ends."""

    concurrency: Whole = Field(description="number of open requests")
    requests: Count = Field(description="number of requests")
    lengths: RequestLengths
    limit: OutputLimit = None
    priorities: Priorities = None
    prefixes: SharedPrefixes = None
    sessions: Conversations = None
    duration: ClassVar[None] = None

    @property
    def arrivals(self) -> Closed:
        return Closed(kind="closed", users=self.concurrency)


class Contest(Keys):
    """The requests of the contest's client with `-X X -T T`."""

    X: ContestRate
    T: Positive = Field(description="seconds; the client sends int(T*X) requests")
    lengths: Maybe[Text] = Field(
        None, description="CSV file of lengths, or the data set (default: random lengths like the real ones)"
    )
    tokenizer: Maybe[Text] = Field(None, description="tokenizer.model or tokenizer.json, needed for the data set")
    send_overhead: SendOverhead = 0.0


class ContestWorkload(Keys):
    """The workload of the contest."""

    contest: Contest = Field(description="options of the contest's client")


class Mix(Keys):
    """Several workloads at the same time, each with independent random numbers."""

    mix: Annotated[list[Workload], Field(min_length=1, description="the workloads"), expects("a list of workloads")]


ARRIVAL_FORMS: dict[str, type[Union[Requests, StagedRequests, ClosedRequests]]] = {
    "arrivals": Requests,
    "stages": StagedRequests,
    "concurrency": ClosedRequests,
}


def workload_model(section: Any) -> type[AnyWorkload]:
    """Return the model that the keys of a workload select."""
    keys = section if isinstance(section, Mapping) else {}
    if "contest" in keys or "mix" in keys:
        return ContestWorkload if "contest" in keys else Mix
    forms = [key for key in ARRIVAL_FORMS if key in keys]
    if len(forms) > 1:
        raise BadInput(f"workload: expected one of {', '.join(ARRIVAL_FORMS)}, got {' and '.join(forms)}")
    return ARRIVAL_FORMS[forms[0]] if forms else Requests


def parse_workload(section: Any) -> AnyWorkload:
    """Return a workload as the model that its keys select."""
    return workload_model(section).model_validate(section)


AnyWorkload = Union[Requests, StagedRequests, ClosedRequests, ContestWorkload, Mix]
Workload = Annotated[AnyWorkload, WrapValidator(lambda section, inner: parse_workload(section))]


def workload_from(section: Any) -> AnyWorkload:
    """Check a `workload` section; an error is one line with the key and the expected value."""
    try:
        return parse_workload(section)
    except ValidationError as error:
        raise BadInput(first_error(error, "workload")) from None


def longer_workload(section: Any, times: int) -> dict[str, Any]:
    """Return the section with `times` as many requests of the same distributions; stages start again."""
    if "contest" in section:
        keys = section["contest"]
        return {**section, "contest": {**keys, "T": times * float(keys["T"])}}
    if "mix" in section:
        return {**section, "mix": [longer_workload(part, times) for part in section["mix"]]}
    longer = {key: times * section[key] for key in ("requests", "duration", "stages") if section.get(key) is not None}
    arrivals = section.get("arrivals")
    if isinstance(arrivals, Mapping) and "stages" in arrivals:
        longer["arrivals"] = {**arrivals, "stages": times * arrivals["stages"]}
    return {**section, **longer}
