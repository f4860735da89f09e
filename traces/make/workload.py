"""The `workload` section of a scenario: what each of its keys may be. synth.py makes requests from it.

    requests: 1000                                  # or duration: 600, seconds
    arrivals: {kind: poisson, rate: 8.2}            # arrivals.py has the kinds
    lengths:                                        # lengths.py has the kinds
      kind: lognormal
      prompt: {mean: 265, sd: 300}
      output: {mean: 255, sd: 200, max: 2048}
    limit: 2048                                     # tokens each may write, if not what it will write
    priorities: {0: 0.9, 1: 0.1}                    # priority -> part of the requests

or `contest: {X: 0.5, T: 3000}`, or `mix: [...]`, several such workloads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, Field, ValidationError, WrapValidator, field_validator
from servesim.core import BadInput
from servesim.files.checked import AtLeast0, Keys, Maybe, Positive, Text, Whole, first_fault, says, whole, wrong

from .arrivals import Arrivals, Asked, Dispatch
from .lengths import Lengths


def level(value: Any) -> Any:
    """Return a priority as a number; JSON has only texts for keys."""
    return int(value) if isinstance(value, str) and value.removeprefix("-").isdecimal() else value


Priority = Annotated[int, Field(strict=True), BeforeValidator(level), says("whole numbers for priorities")]
Count = Annotated[
    int, Field(strict=True, ge=1, le=10**8), BeforeValidator(whole), says(f"a whole number from 1 to {10**8}")
]


class Requests(Keys):
    """Requests by an arrival process and by lengths."""

    either = (("requests",), ("duration",))
    others = ("contest", "mix")
    requests: Maybe[Count] = Field(None, description="how many requests; or duration")
    duration: Maybe[Positive] = Field(None, description="seconds in which all arrive; or requests")
    arrivals: Arrivals = Field(description="when requests arrive")
    lengths: Lengths = Field(description="how long prompts and outputs are, tokens")
    limit: Maybe[Whole] = Field(None, description="tokens each may write, if not what it will write")
    priorities: Maybe[dict[Priority, AtLeast0]] = Field(
        None, description="part of the requests of each priority; the parts need not add up to 1"
    )

    @field_validator("priorities")
    @classmethod
    def _some(cls, parts: dict[int, float]) -> dict[int, float]:
        if not sum(parts.values()) > 0:
            raise wrong("expected parts that add up to more than 0")
        return parts


class Contest(Keys):
    """The requests of the contest's client at `-X X -T T`."""

    X: Asked
    T: Positive = Field(description="seconds; int(T*X) requests are sent")
    lengths: Maybe[Text] = Field(None, description="file of lengths, or the data set itself; drawn where left out")
    tokenizer: Maybe[Text] = Field(None, description="tokenizer.model or .json, for the data set itself")
    dispatch: Dispatch = 0.0


class ContestWorkload(Keys):
    """The contest's own workload."""

    contest: Contest = Field(description="how its client is called")


class Mix(Keys):
    """Several workloads at once, each with chance of its own."""

    mix: Annotated[list[Workload], Field(min_length=1, description="the workloads"), says("a list of workloads")]


def form_of(given: Any) -> AnyWorkload:
    """Return a workload as the model of its form."""
    if isinstance(given, Mapping) and "contest" in given:
        return ContestWorkload.model_validate(given)
    if isinstance(given, Mapping) and "mix" in given:
        return Mix.model_validate(given)
    return Requests.model_validate(given)


AnyWorkload = Union[Requests, ContestWorkload, Mix]
Workload = Annotated[AnyWorkload, WrapValidator(lambda given, inner: form_of(given))]


def workload_from(given: Any) -> AnyWorkload:
    """Check a `workload` section; a BadInput is one line that names the key and what was expected."""
    try:
        return form_of(given)
    except ValidationError as error:
        raise BadInput(first_fault(error, "workload")) from None
