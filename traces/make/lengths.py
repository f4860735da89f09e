"""How long prompts and outputs are: every kind of distribution, its keys in a workload and how lengths are drawn.

Lengths are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator, field_validator
from servesim.files import checked
from servesim.files.checked import KIND, MOST, AtLeast0, Finite, Keys, Maybe, Numbers, Positive, Text, Whole
from servesim.traces.random_streams import stream
from servesim.traces.read.load import load
from servesim.traces.trace import Columns

Floats = NDArray[np.float64]
CONTEST = Path(__file__).parents[1] / "data" / "contest_lengths.csv"  # quantiles of the contest's lengths
CONTEST_TOTAL = 512  # the longest prompt and output of the contest's 1500 requests together
SIDE = Field(description="which of the kinds this is; that of lengths where left out")


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
            raise checked.expected(f"at least {least}, {info.data[least]}")
        return most

    def lengths(self, normal: Floats) -> list[int]:
        """Return a length for every standard normal number."""
        drawn = np.clip(np.rint(self.drawn(normal)), self.min, self.max)
        return list(drawn.astype(np.int64).tolist())

    def drawn(self, normal: Floats) -> Floats:
        """Return lengths before they are rounded and kept within `min` and `max`."""
        raise NotImplementedError


class Fixed(Side):
    """The same for all."""

    kind: Annotated[Literal["fixed"], SIDE] = "fixed"
    tokens: Whole = Field(description="tokens of each")

    def drawn(self, normal: Floats) -> Floats:
        return np.full(len(normal), float(self.tokens))


class Uniform(Side):
    """Any whole number from `low` to `high`, both included."""

    kind: Annotated[Literal["uniform"], SIDE] = "uniform"
    low: Whole = Field(description="tokens of the shortest")
    high: Whole = Field(description="tokens of the longest")

    def drawn(self, normal: Floats) -> Floats:
        return np.floor(self.low + even(normal) * (self.high - self.low + 1)).clip(self.low, self.high)


class Lognormal(Side):
    """Lognormal, by `mean` and `sd` of the lengths themselves, or by `median` and `sigma` of their logarithm."""

    either = (("mean", "sd"), ("median", "sigma"))
    kind: Annotated[Literal["lognormal"], SIDE] = "lognormal"
    mean: Maybe[Positive] = Field(None, description="mean, tokens")
    sd: Maybe[AtLeast0] = Field(None, description="standard deviation, tokens")
    median: Maybe[Positive] = Field(None, description="median, tokens")
    sigma: Maybe[AtLeast0] = Field(None, description="standard deviation of the logarithm, no unit")

    def drawn(self, normal: Floats) -> Floats:
        if self.median is not None and self.sigma is not None:
            return np.asarray(self.median * np.exp(self.sigma * normal), np.float64)
        assert self.mean is not None and self.sd is not None
        variance = math.log1p((self.sd / self.mean) ** 2)
        return np.asarray(np.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * normal), np.float64)


class Quantiles(Side):
    """Straight lines between known quantiles: `at` (0 to 1, rising) and the `tokens` there."""

    kind: Annotated[Literal["quantiles"], SIDE] = "quantiles"
    at: Numbers = Field(description="parts of the requests, 0 to 1, rising")
    tokens: Numbers = Field(description="tokens that this part of the requests does not exceed")

    @field_validator("at")
    @classmethod
    def _rising(cls, at: list[float]) -> list[float]:
        if len(at) < 2 or at[0] != 0 or at[-1] != 1 or sorted(set(at)) != at:
            raise checked.expected("rising numbers that begin with 0 and end with 1")
        return at

    @field_validator("tokens")
    @classmethod
    def _matched(cls, tokens: list[float], info: ValidationInfo) -> list[float]:
        count = len(info.data.get("at", tokens))
        if len(tokens) != count or sorted(tokens) != tokens:
            raise checked.expected(f"{count} lengths, none below the one before")
        return tokens

    def drawn(self, normal: Floats) -> Floats:
        return np.interp(even(normal), self.at, self.tokens)


def even(normal: Floats) -> Floats:
    """Return standard normal numbers as numbers spread evenly over 0 to 1."""
    return np.fromiter((0.5 * math.erfc(-z * math.sqrt(0.5)) for z in normal), np.float64, len(normal))


AnySide = Union[Fixed, Uniform, Lognormal, Quantiles]
SIDE_KINDS = checked.kinds_of(*get_args(AnySide))


def side_of(given: Any, inner: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Return the distribution of one side; a bare number is fixed, two in a list are uniform."""
    kind = info.data.get("kind")
    if type(given) is int:
        given = {"kind": "fixed", "tokens": given}
    elif isinstance(given, (list, tuple)) and len(given) == 2:
        given = {"kind": "uniform", "low": given[0], "high": given[1]}
    elif isinstance(given, Mapping) and kind is not None:
        given = {"kind": kind, **given}
    return checked.of_kind(given, SIDE_KINDS)


OneSide = Annotated[AnySide, WrapValidator(side_of, json_schema_input_type=Union[AnySide, Whole, tuple[Whole, Whole]])]


class BothSides(Keys):
    """Prompts and outputs, each by a distribution of its own."""

    kind: Optional[Literal["fixed", "uniform", "lognormal", "quantiles"]] = Field(
        None, description="kind of prompt and of output, where they name none"
    )
    prompt: OneSide = Field(description="tokens of prompts: a distribution, a number, or the lowest and the highest")
    output: OneSide = Field(description="tokens of outputs: a distribution, a number, or the lowest and the highest")
    correlation: Annotated[Finite, Field(ge=-1, le=1), checked.says("a number from -1 to 1")] = Field(
        0.0, description="of prompts and outputs, as normal numbers before they become lengths; no unit"
    )

    def pairs(self, count: int, seed: int) -> Columns:
        """Return the lengths of `count` requests."""
        prompt = stream(seed, "prompt").standard_normal(count)
        other = stream(seed, "output").standard_normal(count)
        output = self.correlation * prompt + math.sqrt(1 - self.correlation**2) * other
        return Columns(self.prompt.lengths(prompt), self.output.lengths(output))


class TraceLengths(Keys):
    """Pairs of a trace: drawn with replacement, or in file order, from the start again where it ends."""

    kind: Annotated[Literal["trace"], KIND]
    path: Text = Field(description="the file")
    format: Optional[Text] = Field(None, description="its format, if it is not to be recognised")
    columns: Optional[dict[str, str]] = Field(None, description="which column holds a field: {prompt: tokens_in}")
    draw: Annotated[Literal["resample", "in-order"], checked.says("one of resample, in-order")] = Field(
        "resample", description="with replacement, or in file order"
    )

    def pairs(self, count: int, seed: int) -> Columns:
        """Return the lengths of `count` requests, and what each may write."""
        requests = load(self.path, self.format, self.columns).requests
        if self.draw == "resample":
            rows = stream(seed, "lengths").integers(len(requests), size=count).tolist()
        else:
            rows = [k % len(requests) for k in range(count)]
        chosen = [requests[row] for row in rows]
        return Columns(
            [request.prompt for request in chosen],
            [request.output for request in chosen],
            limit=[request.limit for request in chosen],
        )


class ContestLengths(Keys):
    """Lengths like the contest's."""

    kind: Annotated[Literal["contest"], KIND]

    def pairs(self, count: int, seed: int) -> Columns:
        """Return the lengths of `count` requests."""
        return contest_lengths(count, seed)


def contest_lengths(count: int, seed: int) -> Columns:
    """Return prompts and outputs like those of the contest: long outputs go with short prompts, as there.

    The contest's set is fixed, so its totals hardly vary from run to run: the draws are stratified.
    """
    chance = stream(seed, "lengths")
    lines = [line for line in CONTEST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    at, prompt_at, *outputs_at = np.loadtxt(lines[1:], delimiter=",").T
    place = strata(count, chance)
    prompts = np.rint(np.interp(place, at, prompt_at)).astype(np.int64)
    outputs = np.empty(count, np.int64)
    groups = (place * len(outputs_at)).astype(np.int64)
    for group, output_at in enumerate(outputs_at):
        members = np.flatnonzero(groups == group)
        outputs[members] = np.rint(np.interp(strata(len(members), chance), at, output_at))
    return Columns(prompts.tolist(), np.minimum(outputs, CONTEST_TOTAL - prompts).tolist())


def strata(count: int, chance: np.random.Generator) -> Floats:
    """Return uniform numbers, one from each of `count` equal parts of 0 to 1, in random order."""
    return np.asarray((chance.permutation(count) + chance.random(count)) / max(count, 1), np.float64)


AnyLengths = Union[BothSides, TraceLengths, ContestLengths]
PAIR_KINDS = checked.kinds_of(TraceLengths, ContestLengths)


def lengths_of(given: Any, inner: ValidatorFunctionWrapHandler) -> Any:
    """Return lengths: `kind` trace or contest gives both sides, any other kind is the default of each side."""
    if isinstance(given, Mapping) and given.get("kind") is None:
        return BothSides.model_validate(given)
    return checked.of_kind(given, {**dict.fromkeys(SIDE_KINDS, BothSides), **PAIR_KINDS})


Lengths = Annotated[AnyLengths, WrapValidator(lengths_of)]
