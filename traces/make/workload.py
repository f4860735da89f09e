"""The `workload` section of a scenario: what each of its keys may be. synth.py makes requests from it.

    requests: 1000                                  # or duration: 600, seconds
    arrivals: {kind: poisson, rate: 8.2}            # ARRIVAL_KINDS lists the kinds
    lengths:                                        # SIDE_KINDS and PAIR_KINDS list the kinds
      kind: lognormal
      prompt: {mean: 265, sd: 300}
      output: {mean: 255, sd: 200, max: 2048}
    limit: 2048                                     # tokens each may write, if not what it will write
    priorities: {0: 0.9, 1: 0.1}                    # priority -> part of the requests

or `contest: {X: 0.5, T: 3000}`, or `mix: [...]`, several such workloads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, Union, get_args

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from servesim.core import BadInput
from servesim.files.checked import (
    MOST,
    AtLeast0,
    Finite,
    Keys,
    Kind,
    Maybe,
    Numbers,
    Positive,
    Text,
    Whole,
    expected,
    first_fault,
    of_kind,
    says,
    whole,
    wrong,
)

KIND = Field(description="which of the kinds this is")
SIDE = Field(description="which of the kinds this is; that of lengths where left out")
Rate = Annotated[Positive, Field(description="requests a second, on average")]
Asked = Annotated[Positive, Field(description="requests a second that the contest's client is asked for")]
Dispatch = Annotated[AtLeast0, Field(description="seconds by which each gap is longer than drawn")]


def kinds_of(*models: type[Kind]) -> dict[str, type[Kind]]:
    """Return models by the kind that each of them names."""
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in models}


class Constant(Keys):
    """One every 1/rate seconds, the first at 0."""

    kind: Annotated[Literal["constant"], KIND]
    rate: Rate


class Poisson(Keys):
    """Exponential gaps: as many independent users make."""

    kind: Annotated[Literal["poisson"], KIND]
    rate: Rate


class Gamma(Keys):
    """Gamma gaps: burstiness 1 is Poisson, below it comes in bursts, above it evens out. CV = 1/sqrt(burstiness)."""

    either = (("burstiness",), ("cv",))
    kind: Annotated[Literal["gamma"], KIND]
    rate: Rate
    burstiness: Maybe[Positive] = Field(None, description="shape of the gaps' distribution, no unit")
    cv: Maybe[Positive] = Field(None, description="standard deviation of the gaps over their mean, no unit")


class Vllm(Keys):
    """As `vllm bench serve --request-rate R --burstiness B`: gamma gaps, stretched to end at exactly count/rate."""

    kind: Annotated[Literal["vllm"], KIND]
    rate: Rate
    burstiness: Positive = Field(1.0, description="shape of the gaps' distribution, no unit")


class ContestArrivals(Keys):
    """As the contest's client at `-X X`."""

    kind: Annotated[Literal["contest"], KIND]
    X: Asked
    dispatch: Dispatch = 0.0


class OnOff(Keys):
    """Poisson at one rate for a while, then at another: a Markov-modulated process of two states, on first."""

    kind: Annotated[Literal["on-off"], KIND]
    on_rate: Positive = Field(description="requests a second while on")
    off_rate: AtLeast0 = Field(0.0, description="requests a second while off")
    on_seconds: Positive = Field(description="mean seconds that on lasts")
    off_seconds: Positive = Field(description="mean seconds that off lasts")


class Mmpp(Keys):
    """Poisson whose rate jumps between states, each kept for an exponential time; the next one is any of the others."""

    kind: Annotated[Literal["mmpp"], KIND]
    rates: Numbers = Field(description="requests a second in each state")
    seconds: Numbers = Field(description="mean seconds that each state lasts")

    @field_validator("rates")
    @classmethod
    def _any(cls, rates: list[float]) -> list[float]:
        if not max(rates) > 0:
            raise expected("one above 0")
        return rates

    @field_validator("seconds")
    @classmethod
    def _matched(cls, seconds: list[float], info: ValidationInfo) -> list[float]:
        rates = info.data.get("rates", [])
        if len(rates) != len(seconds) or len(rates) < 2:
            raise expected(f"as many as rates, at least 2 (rates has {len(rates)})")
        if not min(seconds) > 0:
            raise expected("numbers above 0")
        return seconds


class Diurnal(Keys):
    """Poisson whose rate swings about its mean as a cosine, highest at `peak`: day and night."""

    kind: Annotated[Literal["diurnal"], KIND]
    rate: Rate
    swing: Annotated[Finite, Field(ge=0, le=1), says("a part of the mean rate, 0 to 1")] = Field(
        0.8, description="how far the rate goes from its mean, as a part of it"
    )
    period: Positive = Field(86400.0, description="seconds from one peak to the next")
    peak: AtLeast0 = Field(0.0, description="seconds at which the rate is highest")


class Burst(Keys):
    """All at once."""

    kind: Annotated[Literal["burst"], KIND]


class Closed(Keys):
    """A closed loop: each of `users` sends its next request `think` seconds after the last was answered.

    Pauses are constant, or exponential about `think`; users start evenly over `ramp` seconds.
    """

    kind: Annotated[Literal["closed"], KIND]
    users: Whole = Field(description="users that send requests, each one at a time")
    think: AtLeast0 = Field(0.0, description="seconds from an answer to the user's next request")
    pauses: Annotated[Literal["constant", "exponential"], says("one of constant, exponential")] = Field(
        "constant", description="how pauses are distributed"
    )
    ramp: AtLeast0 = Field(0.0, description="seconds over which users start")


Arrival = Union[Constant, Poisson, Gamma, Vllm, ContestArrivals, OnOff, Mmpp, Diurnal, Burst, Closed]
ARRIVAL_KINDS: dict[str, type[Keys]] = kinds_of(*get_args(Arrival))


def arrivals_of(given: Any, inner: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Return the arrival process; one without a rate cannot fill a duration."""
    keys = of_kind(given, ARRIVAL_KINDS)
    if isinstance(keys, (Burst, Closed)) and info.data.get("duration") is not None:
        raise BadInput(f"workload.requests: expected with arrivals of kind {keys.kind}, got duration")
    return keys


class Side(Keys):
    """A distribution of prompts or of outputs."""

    kind: Annotated[str, SIDE]
    min: Whole = Field(1, description="tokens of the shortest; what is drawn below becomes it")
    max: Whole = Field(MOST, description="tokens of the longest; what is drawn above becomes it")

    @field_validator("max", "high", check_fields=False)
    @classmethod
    def _ordered(cls, most: int, info: ValidationInfo) -> int:
        least = "min" if info.field_name == "max" else "low"
        if most < info.data.get(least, 1):
            raise expected(f"at least {least}, {info.data[least]}")
        return most


class Fixed(Side):
    """The same for all."""

    kind: Annotated[Literal["fixed"], SIDE] = "fixed"
    tokens: Whole = Field(description="tokens of each")


class Uniform(Side):
    """Any whole number from `low` to `high`, both included."""

    kind: Annotated[Literal["uniform"], SIDE] = "uniform"
    low: Whole = Field(description="tokens of the shortest")
    high: Whole = Field(description="tokens of the longest")


class Lognormal(Side):
    """Lognormal, by `mean` and `sd` of the lengths themselves, or by `median` and `sigma` of their logarithm."""

    either = (("mean", "sd"), ("median", "sigma"))
    kind: Annotated[Literal["lognormal"], SIDE] = "lognormal"
    mean: Maybe[Positive] = Field(None, description="mean, tokens")
    sd: Maybe[AtLeast0] = Field(None, description="standard deviation, tokens")
    median: Maybe[Positive] = Field(None, description="median, tokens")
    sigma: Maybe[AtLeast0] = Field(None, description="standard deviation of the logarithm, no unit")


class Quantiles(Side):
    """Straight lines between known quantiles: `at` (0 to 1, rising) and the `tokens` there."""

    kind: Annotated[Literal["quantiles"], SIDE] = "quantiles"
    at: Numbers = Field(description="parts of the requests, 0 to 1, rising")
    tokens: Numbers = Field(description="tokens that this part of the requests does not exceed")

    @field_validator("at")
    @classmethod
    def _rising(cls, at: list[float]) -> list[float]:
        if len(at) < 2 or at[0] != 0 or at[-1] != 1 or sorted(set(at)) != at:
            raise expected("rising numbers that begin with 0 and end with 1")
        return at

    @field_validator("tokens")
    @classmethod
    def _matched(cls, tokens: list[float], info: ValidationInfo) -> list[float]:
        count = len(info.data.get("at", tokens))
        if len(tokens) != count or sorted(tokens) != tokens:
            raise expected(f"{count} lengths, none below the one before")
        return tokens


AnySide = Union[Fixed, Uniform, Lognormal, Quantiles]
SIDE_KINDS: dict[str, type[Keys]] = kinds_of(*get_args(AnySide))


def side_of(given: Any, inner: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Return the distribution of one side; a bare number is fixed, two in a list are uniform."""
    kind = info.data.get("kind")
    if type(given) is int:
        given = {"kind": "fixed", "tokens": given}
    elif isinstance(given, (list, tuple)) and len(given) == 2:
        given = {"kind": "uniform", "low": given[0], "high": given[1]}
    elif isinstance(given, Mapping) and kind is not None:
        given = {"kind": kind, **given}
    return of_kind(given, SIDE_KINDS)


OneSide = Annotated[AnySide, WrapValidator(side_of, json_schema_input_type=Union[AnySide, Whole, tuple[Whole, Whole]])]


class BothSides(Keys):
    """Prompts and outputs, each by a distribution of its own."""

    kind: Optional[Literal["fixed", "uniform", "lognormal", "quantiles"]] = Field(
        None, description="kind of prompt and of output, where they name none"
    )
    prompt: OneSide = Field(description="tokens of prompts: a distribution, a number, or the lowest and the highest")
    output: OneSide = Field(description="tokens of outputs: a distribution, a number, or the lowest and the highest")
    correlation: Annotated[Finite, Field(ge=-1, le=1), says("a number from -1 to 1")] = Field(
        0.0, description="of prompts and outputs, as normal numbers before they become lengths; no unit"
    )


class TraceLengths(Keys):
    """Pairs of a trace: drawn with replacement, or in file order, from the start again where it ends."""

    kind: Annotated[Literal["trace"], KIND]
    path: Text = Field(description="the file")
    format: Optional[Text] = Field(None, description="its format, if it is not to be recognised")
    columns: Optional[dict[str, str]] = Field(None, description="which column holds a field: {prompt: tokens_in}")
    draw: Annotated[Literal["resample", "in-order"], says("one of resample, in-order")] = Field(
        "resample", description="with replacement, or in file order"
    )


class ContestLengths(Keys):
    """Lengths like the contest's."""

    kind: Annotated[Literal["contest"], KIND]


AnyLengths = Union[BothSides, TraceLengths, ContestLengths]
PAIR_KINDS: dict[str, type[Keys]] = kinds_of(TraceLengths, ContestLengths)


def lengths_of(given: Any, inner: ValidatorFunctionWrapHandler) -> Any:
    """Return lengths: `kind` trace or contest gives both sides, any other kind is the default of each side."""
    if isinstance(given, Mapping) and given.get("kind") is None:
        return BothSides.model_validate(given)
    models: dict[str, type[Keys]] = {**dict.fromkeys(SIDE_KINDS, BothSides), **PAIR_KINDS}
    return of_kind(given, models)


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
    arrivals: Annotated[Arrival, Field(discriminator="kind"), WrapValidator(arrivals_of)] = Field(
        description="when requests arrive"
    )
    lengths: Annotated[AnyLengths, WrapValidator(lengths_of)] = Field(
        description="how long prompts and outputs are, tokens"
    )
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
