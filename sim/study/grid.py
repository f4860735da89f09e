"""The parameter grid of a sweep: scenario keys with lists or ranges, expanded into configurations.

    policy.decode_batch: [16, 32, 64]                      # a list
    policy.delay_factor: {range: [0, 2], step: 0.5}        # both ends included
    engine.num_blocks: {range: [64, 1024], count: 5, scale: log}
    policy: [{name: llm-serving, decode_batch: 32}, vllm]  # a whole section, policy family included

A list of such mappings is their union. So each policy family can have different keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Union

from servesim.core import BadInput
from servesim.core.limits import MAX_CONFIGS, MAX_NUMBER, MIN_NUMBER, is_number
from servesim.files.read import check_keys, quote

Assignment = dict[str, Any]  # scenario key -> value
Grids = Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]


def unroll(params: Grids) -> list[Assignment]:
    """Return the configurations of one or several grids; the last key of a grid varies fastest."""
    grids = [params] if isinstance(params, Mapping) else list(params)
    configs: list[Assignment] = []
    for index, grid in enumerate(grids):
        where = "params" if isinstance(params, Mapping) else f"params[{index}]"
        if not isinstance(grid, Mapping):
            raise BadInput(f"{where}: expected keys and their values, got {grid!r}")
        axes = [parse_values(str(key), spec, where) for key, spec in grid.items()]
        size = math.prod(map(len, axes))
        if size > MAX_CONFIGS:
            raise BadInput(f"{where}: expected at most {MAX_CONFIGS} configurations, got {size}; use `sim search`")
        configs += [dict(zip(map(str, grid), values)) for values in itertools.product(*axes)]
    return configs


def parse_values(key: str, spec: Any, where: str = "params") -> list[Any]:
    """Read the values of one key."""
    where = f"{where}.{key}"
    if key == "seed":
        same = "all configurations use the same random numbers"
        raise BadInput(f"{where}: cannot be swept: {same}; set `replications` instead")
    if isinstance(spec, Mapping):
        if "range" not in spec:
            raise BadInput(f"{where}: expected a list or a range, got {dict(spec)!r}")
        return parse_range(spec, where)
    values = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if not values:
        raise BadInput(f"{where}: expected at least one value, got none")
    return values


def parse_range(spec: Mapping[str, Any], where: str) -> list[Any]:
    """Read {range: [a, b], step: s} or {range: [a, b], count: n, scale: linear|log}; both ends included."""
    check_keys(spec, ("range", "step", "count", "scale"), where)
    low, high = parse_bounds(spec["range"], f"{where}.range")
    whole = isinstance(low, int) and isinstance(high, int)
    if ("step" in spec) == ("count" in spec):
        raise BadInput(f"{where}: expected range with either step or count")
    if "step" in spec:
        step = parse_step(spec["step"], where)
        if high - low > (MAX_CONFIGS - 1) * step:
            raise BadInput(f"{where}.step: expected at most {MAX_CONFIGS} values in the range, got step {step!r}")
        steps = math.floor((high - low) / step + 1e-9)
        return [round_value(low + k * step, whole and isinstance(step, int)) for k in range(steps + 1)]
    count = spec["count"]
    if type(count) is not int or not 2 <= count <= MAX_CONFIGS:
        expected = f"a whole number of at least 2, at most {MAX_CONFIGS}"
        raise BadInput(f"{where}.count: expected {expected}, got {quote(count)}")
    log = parse_scale(spec.get("scale", "linear"), low, where)
    fractions = [k / (count - 1) for k in range(count)]
    values = [low * (high / low) ** f if log else low + (high - low) * f for f in fractions]
    return list(dict.fromkeys(round_value(value, whole) for value in values))


def parse_step(value: Any, where: str) -> float:
    """Read the distance of two values."""
    step = parse_number(value, f"{where}.step")
    if step <= 0:
        raise BadInput(f"{where}.step: expected more than 0, got {step!r}")
    return step


def parse_scale(scale: Any, low: float, where: str) -> bool:
    """Read a scale; return whether it is logarithmic."""
    if scale not in ("linear", "log") or (scale == "log" and low < MIN_NUMBER):
        raise BadInput(f"{where}.scale: expected linear, or log and a range above 0, got {scale!r}")
    return bool(scale == "log")


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
