"""The parameter grid of a sweep: lists, ranges and random draws over scenario keys, unrolled into configurations.

    policy.decode_batch: [16, 32, 64]                      # a list
    policy.delay_factor: {range: [0, 2], step: 0.5}        # both ends included
    engine.num_blocks: {range: [64, 1024], count: 5, scale: log}
    policy.aging: {uniform: [0, 1]}                        # random: also loguniform, integers, choice
    policy: [{name: llm-serving, decode_batch: 32}, vllm]  # a whole section, policy family included

A list of such mappings is their union, so that each family has the axes that are its own.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

from servesim.config.overrides import Tree, merge, put
from servesim.core import BadInput

Assignment = dict[str, Any]  # scenario key -> value
Grids = Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]
Draw = Callable[[random.Random], Any]
KINDS = ("range", "uniform", "loguniform", "integers", "choice")


class Axis(NamedTuple):
    """One key and the values it takes: listed, or drawn."""

    key: str
    values: Sequence[Any]
    draw: Optional[Draw] = None  # None: the values are all there are


def unroll(params: Grids, samples: Optional[int], seed: int) -> list[Assignment]:
    """Return the configurations of a grid or of several; with `samples`, so many drawn from each."""
    grids = [params] if isinstance(params, Mapping) else list(params)
    found: list[Assignment] = []
    for place, grid in enumerate(grids):
        where = "params" if isinstance(params, Mapping) else f"params[{place}]"
        if not isinstance(grid, Mapping):
            raise BadInput(f"{where}: expected keys and their values, got {grid!r}")
        axes = [axis(str(key), given, where) for key, given in grid.items()]
        found += drawn(axes, samples, random.Random(f"{seed}/{place}"), where) if samples else crossed(axes, where)
    return found


def crossed(axes: Sequence[Axis], where: str) -> list[Assignment]:
    """Return every combination, the last axis fastest."""
    for one in axes:
        if one.draw is not None:
            raise BadInput(f"{where}.{one.key}: drawn at random; say how many with `samples: N`")
    keys = [one.key for one in axes]
    return [dict(zip(keys, values)) for values in itertools.product(*(one.values for one in axes))]


def drawn(axes: Sequence[Axis], samples: int, chance: random.Random, where: str) -> list[Assignment]:
    """Return random combinations; where all axes are lists, no combination twice."""
    if any(one.draw is not None for one in axes):
        return [
            {one.key: one.draw(chance) if one.draw else chance.choice(one.values) for one in axes}
            for _ in range(samples)
        ]
    size = math.prod(len(one.values) for one in axes)
    picked = sorted(chance.sample(range(size), min(samples, size)))
    return [combination(axes, place) for place in picked]


def combination(axes: Sequence[Axis], place: int) -> Assignment:
    """Return one combination by its place in the grid, without unrolling it."""
    found: Assignment = {}
    for one in reversed(axes):
        place, digit = divmod(place, len(one.values))
        found[one.key] = one.values[digit]
    return {one.key: found[one.key] for one in axes}


def axis(key: str, given: Any, where: str = "params") -> Axis:
    """Read the values of one key."""
    where = f"{where}.{key}"
    if key == "seed":
        raise BadInput(f"{where}: no parameter, since configurations share their chance; see `replications`")
    if isinstance(given, Mapping):
        kind = next((name for name in KINDS if name in given), None)
        if kind is None:
            raise BadInput(f"{where}: expected a list or one of {', '.join(KINDS)}, got {dict(given)!r}")
        return ranged(key, given, where) if kind == "range" else random_axis(key, kind, given, where)
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    if not values:
        raise BadInput(f"{where}: expected at least one value, got none")
    return Axis(key, values)


def ranged(key: str, given: Mapping[str, Any], where: str) -> Axis:
    """Read {range: [a, b], step: s} or {range: [a, b], count: n, scale: linear|log}; both ends included."""
    only(given, ("range", "step", "count", "scale"), where)
    low, high = bounds(given["range"], f"{where}.range")
    whole = isinstance(low, int) and isinstance(high, int)
    if ("step" in given) == ("count" in given):
        raise BadInput(f"{where}: expected one of step and count beside range")
    if "step" in given:
        step = number(given["step"], f"{where}.step")
        if step <= 0:
            raise BadInput(f"{where}.step: expected more than 0, got {step!r}")
        steps = math.floor((high - low) / step + 1e-9)
        return Axis(key, [tidy(low + k * step, whole and isinstance(step, int)) for k in range(steps + 1)])
    count = given["count"]
    if type(count) is not int or count < 2:
        raise BadInput(f"{where}.count: expected a whole number of at least 2, got {count!r}")
    scale = given.get("scale", "linear")
    if scale not in ("linear", "log") or (scale == "log" and low <= 0):
        raise BadInput(f"{where}.scale: expected linear, or log and a range above 0, got {scale!r}")
    parts = [k / (count - 1) for k in range(count)]
    spread = [low * (high / low) ** p if scale == "log" else low + (high - low) * p for p in parts]
    return Axis(key, list(dict.fromkeys(tidy(value, whole) for value in spread)))


def random_axis(key: str, kind: str, given: Mapping[str, Any], where: str) -> Axis:
    """Read {KIND: [a, b]}, or {choice: [...]}, which repeats values where a sampled list does not."""
    only(given, (kind,), where)
    where, values = f"{where}.{kind}", given[kind]
    if kind == "choice":
        if not isinstance(values, list) or not values:
            raise BadInput(f"{where}: expected a list of values, got {values!r}")
        return Axis(key, values, lambda chance: chance.choice(values))
    low, high = bounds(values, where)
    if kind == "uniform":
        return Axis(key, (), lambda chance: tidy(chance.uniform(low, high), False))
    if kind == "loguniform":
        if low <= 0:
            raise BadInput(f"{where}: expected bounds above 0, got {low!r}")
        return Axis(key, (), lambda chance: tidy(math.exp(chance.uniform(math.log(low), math.log(high))), False))
    if low != int(low) or high != int(high):
        raise BadInput(f"{where}: expected two whole numbers, got {low!r} and {high!r}")
    return Axis(key, (), lambda chance: chance.randint(int(low), int(high)))


def only(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise a BadInput at a key that is not on the list."""
    for key in given:
        if key not in known:
            raise BadInput(f"{where}.{key}: unknown key; known: {', '.join(known)}")


def bounds(given: Any, where: str) -> tuple[float, float]:
    """Read [low, high]."""
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        raise BadInput(f"{where}: expected [low, high], got {given!r}")
    low, high = number(given[0], where), number(given[1], where)
    if low > high:
        raise BadInput(f"{where}: expected [low, high], got {low!r} above {high!r}")
    return low, high


def number(given: Any, where: str) -> float:
    """Read a finite number."""
    if type(given) not in (int, float) or not math.isfinite(given):
        raise BadInput(f"{where}: expected a number, got {given!r}")
    value: float = given
    return value


def tidy(value: float, whole: bool) -> Union[int, float]:
    """Return a value as people would write it, without the dust of floating point."""
    return round(value) if whole else float(f"{value:.6g}")


def assigned(base: Tree, assignment: Mapping[str, Any]) -> Tree:
    """Return a scenario tree with a configuration laid over it; another policy family brings only its own fields."""
    tree = dict(base)
    if not isinstance(tree.get("policy"), Mapping):
        tree["policy"] = {"name": tree.get("policy") or "llm-serving"}
    for key, value in sorted(assignment.items(), key=rank):
        if key in ("policy", "policy.name"):
            tree = merge(tree, {"policy": value if isinstance(value, Mapping) else {"name": value}})
        elif key in ("trace", "workload"):
            tree = {k: v for k, v in tree.items() if k not in ("trace", "workload")} | {key: value}
        elif "." not in key and isinstance(value, Mapping):
            tree = merge(tree, {key: value})
        else:
            tree = put(tree, key.split("."), value)
    return tree


def rank(item: tuple[str, Any]) -> tuple[int, int]:
    """Sections come before what is inside them, a policy's name before its fields."""
    return (item[0].count("."), int(item[0] != "policy.name"))
