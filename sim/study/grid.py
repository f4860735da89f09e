"""The parameter grid of a sweep: scenario keys with lists, ranges or random values, expanded into configurations.

    policy.decode_batch: [16, 32, 64]                      # a list
    policy.delay_factor: {range: [0, 2], step: 0.5}        # both ends included
    engine.num_blocks: {range: [64, 1024], count: 5, scale: log}
    policy.aging: {uniform: [0, 1]}                        # random: also loguniform, integers, choice
    policy: [{name: llm-serving, decode_batch: 32}, vllm]  # a whole section, policy family included

A list of such mappings is their union. So each policy family can have different keys.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

from servesim.core import BadInput
from servesim.core.limits import MAX_CONFIGS, MAX_NUMBER, MIN_NUMBER, is_number
from servesim.files.read import quote

Assignment = dict[str, Any]  # scenario key -> value
Grids = Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]
Draw = Callable[[random.Random], Any]  # draws one value
MAX_COMBINATIONS = 10**18  # of the values of a sampled grid
KINDS = ("range", "uniform", "loguniform", "integers", "choice")


class Axis(NamedTuple):
    """One key with its values: a list, or a random distribution."""

    key: str
    values: Sequence[Any]
    draw: Optional[Draw] = None  # None: only `values`


def unroll(params: Grids, samples: Optional[int], seed: int) -> list[Assignment]:
    """Return the configurations of one or several grids; with `samples`, that number drawn from each."""
    grids = [params] if isinstance(params, Mapping) else list(params)
    configs: list[Assignment] = []
    for index, grid in enumerate(grids):
        where = "params" if isinstance(params, Mapping) else f"params[{index}]"
        if not isinstance(grid, Mapping):
            raise BadInput(f"{where}: expected keys and their values, got {grid!r}")
        axes = [parse_axis(str(key), spec, where) for key, spec in grid.items()]
        configs += draw_configs(axes, samples, random.Random(f"{seed}/{index}")) if samples else cross(axes, where)
    return configs


def cross(axes: Sequence[Axis], where: str) -> list[Assignment]:
    """Return every combination; the last key varies fastest."""
    for axis in axes:
        if axis.draw is not None:
            raise BadInput(f"{where}.{axis.key}: has random values; set the number of draws with `samples: N`")
    size = math.prod(len(axis.values) for axis in axes)
    if size > MAX_CONFIGS:
        raise BadInput(
            f"{where}: expected at most {MAX_CONFIGS} configurations, got {size}; draw some with `samples: N`"
        )
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values)) for values in itertools.product(*(axis.values for axis in axes))]


def draw_configs(axes: Sequence[Axis], samples: int, rng: random.Random) -> list[Assignment]:
    """Return random combinations, without duplicates if all keys have lists."""
    if any(axis.draw is not None for axis in axes):
        return [
            {axis.key: axis.draw(rng) if axis.draw else rng.choice(axis.values) for axis in axes}
            for _ in range(samples)
        ]
    size = math.prod(len(axis.values) for axis in axes)
    if size > MAX_COMBINATIONS:
        raise BadInput(f"params: expected at most {MAX_COMBINATIONS:.0e} combinations, got {quote(size)}")
    picked = sorted(rng.sample(range(size), min(samples, size)))
    return [nth_config(axes, index) for index in picked]


def nth_config(axes: Sequence[Axis], index: int) -> Assignment:
    """Return one combination by its index in the grid, without building the others."""
    values: Assignment = {}
    for axis in reversed(axes):
        index, digit = divmod(index, len(axis.values))
        values[axis.key] = axis.values[digit]
    return {axis.key: values[axis.key] for axis in axes}


def parse_axis(key: str, spec: Any, where: str = "params") -> Axis:
    """Read the values of one key."""
    where = f"{where}.{key}"
    if key == "seed":
        same = "all configurations use the same random numbers"
        raise BadInput(f"{where}: cannot be swept: {same}; set `replications` instead")
    if isinstance(spec, Mapping):
        kind = next((name for name in KINDS if name in spec), None)
        if kind is None:
            raise BadInput(f"{where}: expected a list or one of {', '.join(KINDS)}, got {dict(spec)!r}")
        return parse_range(key, spec, where) if kind == "range" else parse_random(key, kind, spec, where)
    values = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if not values:
        raise BadInput(f"{where}: expected at least one value, got none")
    return Axis(key, values)


def parse_range(key: str, spec: Mapping[str, Any], where: str) -> Axis:
    """Read {range: [a, b], step: s} or {range: [a, b], count: n, scale: linear|log}; both ends included."""
    check_keys(spec, ("range", "step", "count", "scale"), where)
    low, high = parse_bounds(spec["range"], f"{where}.range")
    whole = isinstance(low, int) and isinstance(high, int)
    if ("step" in spec) == ("count" in spec):
        raise BadInput(f"{where}: expected range with either step or count")
    if "step" in spec:
        step = parse_number(spec["step"], f"{where}.step")
        if step <= 0:
            raise BadInput(f"{where}.step: expected more than 0, got {step!r}")
        if high - low > (MAX_CONFIGS - 1) * step:
            raise BadInput(f"{where}.step: expected at most {MAX_CONFIGS} values in the range, got step {step!r}")
        steps = math.floor((high - low) / step + 1e-9)
        return Axis(key, [round_value(low + k * step, whole and isinstance(step, int)) for k in range(steps + 1)])
    count = spec["count"]
    if type(count) is not int or not 2 <= count <= MAX_CONFIGS:
        expected = f"a whole number of at least 2, at most {MAX_CONFIGS}"
        raise BadInput(f"{where}.count: expected {expected}, got {quote(count)}")
    scale = spec.get("scale", "linear")
    if scale not in ("linear", "log") or (scale == "log" and low < MIN_NUMBER):
        raise BadInput(f"{where}.scale: expected linear, or log and a range above 0, got {scale!r}")
    fractions = [k / (count - 1) for k in range(count)]
    values = [low * (high / low) ** f if scale == "log" else low + (high - low) * f for f in fractions]
    return Axis(key, list(dict.fromkeys(round_value(value, whole) for value in values)))


def parse_random(key: str, kind: str, spec: Mapping[str, Any], where: str) -> Axis:
    """Read {KIND: [a, b]}, or {choice: [...]}, which may draw a value twice (a sampled list does not)."""
    check_keys(spec, (kind,), where)
    where, values = f"{where}.{kind}", spec[kind]
    if kind == "choice":
        if not isinstance(values, list) or not values:
            raise BadInput(f"{where}: expected a list of values, got {values!r}")
        return Axis(key, values, lambda rng: rng.choice(values))
    low, high = parse_bounds(values, where)
    if kind == "uniform":
        return Axis(key, (), lambda rng: round_value(rng.uniform(low, high), False))
    if kind == "loguniform":
        if low < MIN_NUMBER:
            raise BadInput(f"{where}: expected bounds above 0, at least {MIN_NUMBER:g}, got {low!r}")
        return Axis(key, (), lambda rng: round_value(math.exp(rng.uniform(math.log(low), math.log(high))), False))
    if low != int(low) or high != int(high):
        raise BadInput(f"{where}: expected two whole numbers, got {low!r} and {high!r}")
    return Axis(key, (), lambda rng: rng.randint(int(low), int(high)))


def check_keys(spec: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise BadInput for an unknown key."""
    for key in spec:
        if key not in known:
            raise BadInput(f"{where}.{key}: unknown key; known: {', '.join(known)}")


def parse_bounds(value: Any, where: str) -> tuple[float, float]:
    """Read [low, high]."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise BadInput(f"{where}: expected [low, high], got {value!r}")
    low, high = parse_number(value[0], where), parse_number(value[1], where)
    if low > high:
        raise BadInput(f"{where}: expected [low, high], got {low!r} above {high!r}")
    return low, high


def parse_number(value: Any, where: str) -> float:
    """Read a number."""
    if not is_number(value):
        raise BadInput(f"{where}: expected a number, got {quote(value)} (limits: {-MAX_NUMBER:g} to {MAX_NUMBER:g})")
    number: float = value
    return number


def round_value(value: float, whole: bool) -> Union[int, float]:
    """Return a value without floating-point rounding errors (0.3, not 0.30000000000000004)."""
    return round(value) if whole else float(f"{value:.6g}")
