"""How long prompts and outputs are: the kinds of distribution a workload can name. Lengths are tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.traces.random_streams import stream
from servesim.traces.read.load import load

from .quantiles import contest_lengths
from .section import Section

Floats = NDArray[np.float64]


class Lengths(NamedTuple):
    """Tokens of every request; `limits` where they differ from what will be written."""

    prompts: list[int]
    outputs: list[int]
    limits: Optional[list[Optional[int]]] = None


class Side(NamedTuple):
    """A distribution of prompts or of outputs, and the keys of its section."""

    draw: Callable[[Floats, Section], Floats]  # standard normal numbers -> lengths
    keys: tuple[str, ...]


def lengths(section: Section, count: int, seed: int) -> Lengths:
    """Return so many prompts and outputs.

    `kind` trace or contest gives both; any other kind is the default of the sections `prompt` and `output`.
    """
    kind = section.values.get("kind")
    if kind is not None:
        section.choice("kind", (*SIDES, *PAIRS))
    if kind in PAIRS:
        draw, keys = PAIRS[kind]
        section.only(("kind", *keys))
        return draw(count, seed, section)
    section.only(("kind", "prompt", "output", "correlation"))
    prompt, output = normals(count, seed, section.number("correlation", 0.0, least=-1.0))
    return Lengths(_side(section, "prompt", kind, prompt), _side(section, "output", kind, output))


def normals(count: int, seed: int, correlation: float) -> tuple[Floats, Floats]:
    """Return two columns of standard normal numbers, each from a stream of its own, so correlated."""
    if correlation > 1:
        raise BadInput(f"workload.lengths.correlation: expected a number from -1 to 1, got {correlation:g}")
    prompt = stream(seed, "prompt").standard_normal(count)
    other = stream(seed, "output").standard_normal(count)
    return prompt, correlation * prompt + math.sqrt(1 - correlation**2) * other


def _side(section: Section, name: str, default: Optional[str], normal: Floats) -> list[int]:
    """Return the lengths of one side; a bare number is fixed, two in a list are uniform."""
    value = section.values.get(name)
    where = f"{section.where}.{name}"
    if type(value) is int:
        keys = Section({"kind": "fixed", "tokens": value}, where)
    elif isinstance(value, (list, tuple)) and len(value) == 2:
        keys = Section({"kind": "uniform", "low": value[0], "high": value[1]}, where)
    else:
        keys = section.section(name)
    side = SIDES[keys.choice("kind", SIDES, default)]
    keys.only(("kind", "min", "max", *side.keys))
    least, most = keys.whole("min", 1), keys.whole("max", 2**31 - 1)
    if least > most:
        raise keys.bad("max", f"at least min, {least}")
    drawn = np.clip(np.rint(side.draw(normal, keys)), least, most)
    return [int(tokens) for tokens in drawn]


def fixed(normal: Floats, keys: Section) -> Floats:
    """The same for all."""
    return np.full(len(normal), float(keys.whole("tokens")))


def uniform(normal: Floats, keys: Section) -> Floats:
    """Any whole number from `low` to `high`, both included."""
    low, high = keys.whole("low"), keys.whole("high")
    if high < low:
        raise keys.bad("high", f"at least low, {low}")
    return np.floor(low + _uniform(normal) * (high - low + 1)).clip(low, high)


def lognormal(normal: Floats, keys: Section) -> Floats:
    """Lognormal, by `mean` and `sd` of the lengths themselves, or by `median` and `sigma` of their logarithm."""
    if "median" in keys or "sigma" in keys:
        keys.only(("kind", "min", "max", "median", "sigma"))
        return np.asarray(keys.positive("median") * np.exp(keys.number("sigma") * normal), np.float64)
    mean, sd = keys.positive("mean"), keys.number("sd")
    variance = math.log1p((sd / mean) ** 2)
    return np.asarray(np.exp(math.log(mean) - variance / 2 + math.sqrt(variance) * normal), np.float64)


def quantiles(normal: Floats, keys: Section) -> Floats:
    """Straight lines between known quantiles: `at` (0 to 1, rising) and the `tokens` there."""
    at, tokens = keys.numbers("at"), keys.numbers("tokens")
    if len(at) < 2 or at[0] != 0 or at[-1] != 1 or sorted(set(at)) != at:
        raise keys.bad("at", "rising numbers that begin with 0 and end with 1")
    if len(tokens) != len(at) or sorted(tokens) != tokens:
        raise keys.bad("tokens", f"{len(at)} lengths, none below the one before")
    return np.asarray(np.interp(_uniform(normal), at, tokens), np.float64)


def _uniform(normal: Floats) -> Floats:
    """Return the same numbers spread evenly over 0 to 1."""
    return np.fromiter((0.5 * math.erfc(-z * math.sqrt(0.5)) for z in normal), np.float64, len(normal))


def from_trace(count: int, seed: int, keys: Section) -> Lengths:
    """Pairs of a trace: drawn with replacement, or in file order, from the start again where it ends."""
    requests = load(keys.text("path"), keys.values.get("format"), keys.values.get("columns")).requests
    if keys.choice("draw", ("resample", "in-order"), "resample") == "resample":
        rows: Any = stream(seed, "lengths").integers(len(requests), size=count).tolist()
    else:
        rows = [k % len(requests) for k in range(count)]
    chosen = [requests[row] for row in rows]
    limits: list[Optional[int]] = [request.limit for request in chosen]
    return Lengths([request.prompt for request in chosen], [request.output for request in chosen], limits)


def from_contest(count: int, seed: int, keys: Section) -> Lengths:
    """Lengths like the contest's."""
    return Lengths(*contest_lengths(count, stream(seed, "lengths")))


SIDES: dict[str, Side] = {
    "fixed": Side(fixed, ("tokens",)),
    "uniform": Side(uniform, ("low", "high")),
    "lognormal": Side(lognormal, ("mean", "sd", "median", "sigma")),
    "quantiles": Side(quantiles, ("at", "tokens")),
}
PAIRS: dict[str, tuple[Callable[[int, int, Section], Lengths], tuple[str, ...]]] = {
    "trace": (from_trace, ("path", "format", "columns", "draw")),
    "contest": (from_contest, ()),
}
