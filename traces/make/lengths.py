"""How long prompts and outputs are: the kinds of distribution a workload can name. Lengths are tokens."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.traces.random_streams import stream
from servesim.traces.read.load import load

from .workload import AnyLengths, AnySide, BothSides, ContestLengths, Fixed, Lognormal, Quantiles, TraceLengths, Uniform

Floats = NDArray[np.float64]
CONTEST = Path(__file__).parents[1] / "data" / "contest_lengths.csv"  # quantiles of the contest's lengths
CONTEST_TOTAL = 512  # the longest prompt and output of the contest's 1500 requests together


class Lengths(NamedTuple):
    """Tokens of every request; `limits` where they differ from what will be written."""

    prompts: list[int]
    outputs: list[int]
    limits: Optional[list[Optional[int]]] = None


def lengths(keys: AnyLengths, count: int, seed: int) -> Lengths:
    """Return so many prompts and outputs."""
    if isinstance(keys, BothSides):
        prompt, output = normals(count, seed, keys.correlation)
        return Lengths(_side(keys.prompt, prompt), _side(keys.output, output))
    return PAIRS[keys.kind](count, seed, keys)


def normals(count: int, seed: int, correlation: float) -> tuple[Floats, Floats]:
    """Return two columns of standard normal numbers, each from a stream of its own, so correlated."""
    prompt = stream(seed, "prompt").standard_normal(count)
    other = stream(seed, "output").standard_normal(count)
    return prompt, correlation * prompt + math.sqrt(1 - correlation**2) * other


def _side(keys: AnySide, normal: Floats) -> list[int]:
    drawn = np.clip(np.rint(SIDES[keys.kind](normal, keys)), keys.min, keys.max)
    return [int(tokens) for tokens in drawn]


def _fixed(normal: Floats, keys: Fixed) -> Floats:
    return np.full(len(normal), float(keys.tokens))


def _uniform(normal: Floats, keys: Uniform) -> Floats:
    return np.floor(keys.low + _even(normal) * (keys.high - keys.low + 1)).clip(keys.low, keys.high)


def _lognormal(normal: Floats, keys: Lognormal) -> Floats:
    if keys.median is not None and keys.sigma is not None:
        return np.asarray(keys.median * np.exp(keys.sigma * normal), np.float64)
    assert keys.mean is not None and keys.sd is not None
    variance = math.log1p((keys.sd / keys.mean) ** 2)
    return np.asarray(np.exp(math.log(keys.mean) - variance / 2 + math.sqrt(variance) * normal), np.float64)


def _quantiles(normal: Floats, keys: Quantiles) -> Floats:
    return np.asarray(np.interp(_even(normal), keys.at, keys.tokens), np.float64)


def _even(normal: Floats) -> Floats:
    """Return the same numbers spread evenly over 0 to 1."""
    return np.fromiter((0.5 * math.erfc(-z * math.sqrt(0.5)) for z in normal), np.float64, len(normal))


def _from_trace(count: int, seed: int, keys: TraceLengths) -> Lengths:
    requests = load(keys.path, keys.format, keys.columns).requests
    if keys.draw == "resample":
        rows: Any = stream(seed, "lengths").integers(len(requests), size=count).tolist()
    else:
        rows = [k % len(requests) for k in range(count)]
    chosen = [requests[row] for row in rows]
    limits: list[Optional[int]] = [request.limit for request in chosen]
    return Lengths([request.prompt for request in chosen], [request.output for request in chosen], limits)


def _from_contest(count: int, seed: int, keys: ContestLengths) -> Lengths:
    return Lengths(*contest_lengths(count, stream(seed, "lengths")))


def strata(count: int, chance: np.random.Generator) -> Floats:
    """Return uniform numbers, one from each of `count` equal parts of 0 to 1, in random order."""
    return np.asarray((chance.permutation(count) + chance.random(count)) / max(count, 1), np.float64)


def contest_lengths(count: int, chance: np.random.Generator) -> tuple[list[int], list[int]]:
    """Return prompts and outputs like those of the contest: long outputs go with short prompts, as there.

    The contest's set is fixed, so its totals hardly vary from run to run: the draws are stratified.
    """
    with CONTEST.open() as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    table = np.array([[float(cell) for cell in row] for row in rows[1:]])
    at, prompt_at, outputs_at = table[:, 0], table[:, 1], table[:, 2:]
    place = strata(count, chance)
    prompts = np.rint(np.interp(place, at, prompt_at)).astype(np.int64)
    outputs = np.empty(count, np.int64)
    groups = outputs_at.shape[1]
    for group in range(groups):
        members = np.flatnonzero((place * groups).astype(np.int64) == group)
        drawn = np.interp(strata(len(members), chance), at, outputs_at[:, group])
        outputs[members] = np.rint(drawn).astype(np.int64)
    outputs = np.minimum(outputs, CONTEST_TOTAL - prompts)
    return prompts.tolist(), outputs.tolist()


SIDES: dict[str, Callable[[Floats, Any], Floats]] = {  # standard normal numbers -> lengths
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "quantiles": _quantiles,
}
PAIRS: dict[str, Callable[[int, int, Any], Lengths]] = {"trace": _from_trace, "contest": _from_contest}
