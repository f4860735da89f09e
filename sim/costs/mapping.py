"""Convert cost models to and from the mapping in a profile or a scenario."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from servesim.core import BadInput, StepCost

from .linear import LinearCost
from .table import TableCost

COSTS: dict[str, type[LinearCost] | type[TableCost]] = {"linear": LinearCost, "table": TableCost}


def cost_from(mapping: Mapping[str, Any], where: str) -> StepCost:
    """Build a cost model from the mapping of a profile or a scenario."""
    terms = dict(mapping)
    kind = terms.pop("kind", "linear")
    if kind not in COSTS:
        raise BadInput(f"{where}.kind: expected one of {', '.join(COSTS)}, got {kind!r}")
    known = [f.name for f in fields(COSTS[kind]) if not f.name.startswith("_")]
    for name, value in terms.items():
        if name not in known:
            raise BadInput(f"{where}.{name}: unknown key; known: {', '.join(known)}")
        terms[name] = check_term(kind, name, value, f"{where}.{name}")
    if kind == "table" and not ("prefill" in terms and ("decode_gears" in terms or "decode_curves" in terms)):
        raise BadInput(
            f"{where}: expected prefill, and decode_gears or decode_curves; got {', '.join(terms) or 'none'}"
        )
    try:
        return COSTS[kind](**terms)
    except TypeError as error:
        raise BadInput(f"{where}: {error}") from None


def check_term(kind: str, name: str, value: Any, where: str) -> Any:
    """Validate one field of a cost model."""
    if kind == "table" and name in ("prefill", "decode_gears"):
        return check_points(value, 2 if name == "prefill" else 4, where)
    if name == "decode_curves":
        return check_curves(value, where)
    if name == "token_gears":
        return [bucket for (bucket,) in check_points([[bucket] for bucket in value], 1, where)] if value else ()
    if (name == "rounded" and isinstance(value, bool)) or (name == "mixed_context" and value is None):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadInput(f"{where}: expected a number of seconds, got {value!r}")
    return value


def check_points(points: Any, width: int, where: str) -> list[tuple[float, ...]]:
    """Validate the points of a curve: finite numbers, the first one of each point increasing."""
    if not isinstance(points, (list, tuple)) or not points:
        raise BadInput(f"{where}: expected a list of points, got {points!r}")
    for k, point in enumerate(points):
        valid = isinstance(point, (list, tuple)) and min(2, width) <= len(point) <= width
        if not valid or any(type(x) not in (int, float) or not math.isfinite(x) for x in point):
            raise BadInput(f"{where}[{k}]: expected {'2 to ' if width > 2 else ''}{width} numbers, got {point!r}")
        if k and point[0] <= points[k - 1][0]:
            raise BadInput(f"{where}[{k}]: expected more than {points[k - 1][0]:g} first, got {point[0]:g}")
    return [tuple(point) for point in points]


def check_curves(pairs: Any, where: str) -> list[tuple[float, list[tuple[float, ...]]]]:
    """Validate (rows, curve) pairs; rows must increase."""
    if not isinstance(pairs, (list, tuple)) or any(
        not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in pairs
    ):
        raise BadInput(f"{where}: expected a list of (rows, curve) pairs")
    curves = [(rows, check_points(curve, 2, f"{where}[{k}]")) for k, (rows, curve) in enumerate(pairs)]
    check_points([[rows] for rows, _ in curves], 1, where)
    return curves


def cost_mapping(cost: StepCost) -> dict[str, Any]:
    """Return a cost model as the input of `cost_from`, without default values."""
    for kind, known in COSTS.items():
        if type(cost) is known:
            public = [f for f in fields(known) if not f.name.startswith("_")]
            values = {f.name: getattr(cost, f.name) for f in public if getattr(cost, f.name) not in (f.default, [])}
            return {"kind": kind, **{name: to_list(value) for name, value in values.items()}}
    raise BadInput(f"cost: a {type(cost).__name__} cannot be written to a profile")


def to_list(value: Any) -> Any:
    """Return a value with tuples as lists, for YAML."""
    return [to_list(inner) for inner in value] if isinstance(value, (list, tuple)) else value
