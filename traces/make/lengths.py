"""Length distributions of prompts and outputs: the keys of each kind in a workload, and random lengths.

Lengths are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator
from servesim.core.limits import MAX_SIGMA, MAX_TOKENS
from servesim.files import checked
from servesim.files.checked import (
    KIND,
    AnyAtLeast0,
    AtLeast0,
    Finite,
    Keys,
    Length,
    Limits,
    Maybe,
    Numbers,
    Positive,
    Text,
)
from servesim.traces.trace import Columns, stream

Floats = NDArray[np.float64]
CONTEST = Path(__file__).parents[1] / "data" / "contest_lengths.csv"  # quantiles of the contest's lengths
CONTEST_TOTAL = 512  # maximum prompt + output of the contest's 1500 requests
DISTRIBUTION_KIND = Field(description="kind of distribution (default: `kind` of lengths)")


class LengthDistribution(Keys):
    """A distribution of prompt or output lengths."""

    kind: Annotated[str, DISTRIBUTION_KIND]
    min: Length = Field(1, description="minimum length, tokens; shorter random lengths become this")
    max: Length = Field(MAX_TOKENS, description="maximum length, tokens; longer random lengths become this")

    @field_validator("max", "high", check_fields=False)
    @classmethod
    def _ordered(cls, upper: int, info: ValidationInfo) -> int:
        lower = "min" if info.field_name == "max" else "low"
        if upper < info.data.get(lower, 1):
            raise checked.expected_error(f"at least {lower}, {info.data[lower]}")
        return upper

    def lengths(self, normal: Floats) -> list[int]:
        """Return a length for every standard normal number."""
        rounded = np.clip(np.rint(self.transform(normal)), self.min, self.max)
        return list(rounded.astype(np.int64).tolist())

    def transform(self, normal: Floats) -> Floats:
        """Return lengths before rounding and before `min` and `max` apply."""
        raise NotImplementedError


class Fixed(LengthDistribution):
    """The same length for all requests."""

    kind: Annotated[Literal["fixed"], DISTRIBUTION_KIND] = "fixed"
    tokens: Length = Field(description="length of every request, tokens")

    def transform(self, normal: Floats) -> Floats:
        return np.full(len(normal), float(self.tokens))


class Uniform(LengthDistribution):
    """Uniform whole numbers from `low` to `high`, both included."""

    kind: Annotated[Literal["uniform"], DISTRIBUTION_KIND] = "uniform"
    low: Length = Field(description="minimum length, tokens")
    high: Length = Field(description="maximum length, tokens")

    def transform(self, normal: Floats) -> Floats:
        return np.floor(self.low + to_uniform(normal) * (self.high - self.low + 1)).clip(self.low, self.high)


class Lognormal(LengthDistribution):
    """Lognormal, given by `mean` and `sd` of the lengths, or by `median` and `sigma` (of the logarithm)."""

    either = (("mean", "sd"), ("median", "sigma"))
    kind: Annotated[Literal["lognormal"], DISTRIBUTION_KIND] = "lognormal"
    mean: Maybe[Positive] = Field(None, description="mean, tokens")
    sd: Maybe[AtLeast0] = Field(None, description="standard deviation, tokens")
    median: Maybe[Positive] = Field(None, description="median, tokens")
    sigma: Maybe[Annotated[AnyAtLeast0, Limits(0, MAX_SIGMA)]] = Field(
        None, description="standard deviation of the logarithm, no unit"
    )

    def transform(self, normal: Floats) -> Floats:
        if self.median is not None and self.sigma is not None:
            return np.asarray(self.median * np.exp(self.sigma * normal), np.float64)
        assert self.mean is not None and self.sd is not None
        variance = math.log1p((self.sd / self.mean) ** 2)
        return np.asarray(np.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * normal), np.float64)


class Quantiles(LengthDistribution):
    """Linear interpolation between quantiles: `at` (0 to 1, increasing) and the `tokens` at them."""

    kind: Annotated[Literal["quantiles"], DISTRIBUTION_KIND] = "quantiles"
    at: Numbers = Field(description="quantile levels, 0 to 1, increasing")
    tokens: Numbers = Field(description="length at each quantile level, tokens")

    @field_validator("at")
    @classmethod
    def _rising(cls, at: list[float]) -> list[float]:
        if len(at) < 2 or at[0] != 0 or at[-1] != 1 or sorted(set(at)) != at:
            raise checked.expected_error("increasing numbers, the first 0 and the last 1")
        return at

    @field_validator("tokens")
    @classmethod
    def _matched(cls, tokens: list[float], info: ValidationInfo) -> list[float]:
        count = len(info.data.get("at", tokens))
        if len(tokens) != count or sorted(tokens) != tokens:
            raise checked.expected_error(f"{count} lengths in increasing order")
        return tokens

    def transform(self, normal: Floats) -> Floats:
        return np.interp(to_uniform(normal), self.at, self.tokens)


def to_uniform(normal: Floats) -> Floats:
    """Return standard normal numbers as uniform numbers from 0 to 1."""
    return np.fromiter((0.5 * math.erfc(-z * math.sqrt(0.5)) for z in normal), np.float64, len(normal))


AnyDistribution = Union[Fixed, Uniform, Lognormal, Quantiles]
DISTRIBUTION_KINDS = checked.models_by_kind(*get_args(AnyDistribution))


def distribution_of(section: Any, info: ValidationInfo) -> Any:
    """Return the distribution of prompts or outputs; a number is `fixed`, a list of two numbers `uniform`."""
    kind = info.data.get("kind")
    if type(section) is int:
        section = {"kind": "fixed", "tokens": section}
    elif isinstance(section, (list, tuple)) and len(section) == 2:
        section = {"kind": "uniform", "low": section[0], "high": section[1]}
    elif isinstance(section, Mapping) and kind is not None:
        section = {"kind": kind, **section}
    return checked.validate_kind(section, DISTRIBUTION_KINDS)


Distribution = Annotated[
    AnyDistribution,
    checked.Selected(Union[AnyDistribution, Length, tuple[Length, Length]], distribution_of),
]


class SeparateLengths(Keys):
    """Separate distributions for prompts and outputs."""

    kind: Optional[Literal["fixed", "uniform", "lognormal", "quantiles"]] = Field(
        None, description="default kind of prompt and output"
    )
    prompt: Distribution = Field(description="prompt lengths: a distribution, a number, or [low, high]")
    output: Distribution = Field(description="output lengths: a distribution, a number, or [low, high]")
    correlation: Annotated[Finite, Field(ge=-1, le=1), checked.expects("a number from -1 to 1")] = Field(
        0.0, description="correlation of prompt and output lengths (Gaussian copula), -1 to 1"
    )

    def pairs(self, count: int, seed: int) -> Columns:
        """Return the lengths of `count` requests."""
        prompt = stream(seed, "prompt").standard_normal(count)
        other = stream(seed, "output").standard_normal(count)
        output = self.correlation * prompt + math.sqrt(1 - self.correlation**2) * other
        return Columns(self.prompt.lengths(prompt), self.output.lengths(output))


class TraceLengths(Keys):
    """Length pairs of a trace: sampled with replacement, or in file order and repeated."""

    kind: Annotated[Literal["trace"], KIND]
    path: Text = Field(description="trace file")
    format: Optional[Text] = Field(None, description="trace format (default: detected from the content)")
    columns: Optional[dict[str, str]] = Field(None, description="column names of fields, e.g. {prompt: tokens_in}")
    draw: Annotated[Literal["resample", "in-order"], checked.expects("one of resample, in-order")] = Field(
        "resample", description="resample: with replacement; in-order: in file order"
    )
    tokenizer: Optional[Text] = Field(None, description="tokenizer.model or .json, for formats that hold text")

    def pairs(self, count: int, seed: int) -> Columns:
        """Return lengths and output limits of `count` requests."""
        from servesim.traces.read.formats import load

        requests = load(self.path, self.format, self.columns, tokenizer=self.tokenizer).requests
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
    """Lengths like those of the contest."""

    kind: Annotated[Literal["contest"], KIND]

    def pairs(self, count: int, seed: int) -> Columns:
        """Return the lengths of `count` requests."""
        return contest_lengths(count, seed)


def contest_lengths(count: int, seed: int) -> Columns:
    """Return prompt and output lengths like those of the contest: short prompts have longer outputs.

    The contest's data set is fixed, so its totals hardly vary. Stratified sampling keeps them nearly constant here too.
    """
    rng = stream(seed, "lengths")
    lines = [line for line in CONTEST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    at, prompt_at, *outputs_at = np.loadtxt(lines[1:], delimiter=",").T
    position = stratified_uniform(count, rng)
    prompts = np.rint(np.interp(position, at, prompt_at)).astype(np.int64)
    outputs = np.empty(count, np.int64)
    groups = (position * len(outputs_at)).astype(np.int64)
    for group, output_at in enumerate(outputs_at):
        members = np.flatnonzero(groups == group)
        outputs[members] = np.rint(np.interp(stratified_uniform(len(members), rng), at, output_at))
    return Columns(prompts.tolist(), np.minimum(outputs, CONTEST_TOTAL - prompts).tolist())


def stratified_uniform(count: int, rng: np.random.Generator) -> Floats:
    """Return uniform numbers, one from each of `count` equal intervals of 0 to 1, in random order."""
    return np.asarray((rng.permutation(count) + rng.random(count)) / max(count, 1), np.float64)


AnyLengths = Union[SeparateLengths, TraceLengths, ContestLengths]
PAIR_KINDS = checked.models_by_kind(TraceLengths, ContestLengths)


def lengths_of(section: Any, info: ValidationInfo) -> Any:
    """Return the lengths. `kind` trace or contest gives pairs; another kind is the default of prompt and output."""
    if isinstance(section, Mapping) and section.get("kind") is None:
        return SeparateLengths.model_validate(section)
    return checked.validate_kind(section, {**dict.fromkeys(DISTRIBUTION_KINDS, SeparateLengths), **PAIR_KINDS})


Lengths = Annotated[AnyLengths, checked.Selected(AnyLengths, lengths_of)]
