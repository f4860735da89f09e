"""Cost models as the mapping of a profile or a scenario: checked when read, defaults left out when written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from servesim.core import BadInput, StepCost

from .linear import LinearCost
from .table import TableCost

COSTS: dict[str, type[LinearCost] | type[TableCost]] = {"linear": LinearCost, "table": TableCost}


def cost_from(given: Mapping[str, Any], where: str) -> StepCost:
    """Build a cost model from the mapping of a profile or a scenario."""
    terms = dict(given)
    kind = terms.pop("kind", "linear")
    if kind not in COSTS:
        raise BadInput(f"{where}.kind: expected one of {', '.join(COSTS)}, got {kind!r}")
    known = [f.name for f in fields(COSTS[kind]) if not f.name.startswith("_")]
    for name, value in terms.items():
        if name not in known:
            raise BadInput(f"{where}.{name}: unknown key; known: {', '.join(known)}")
        terms[name] = term(kind, name, value, f"{where}.{name}")
    if kind == "table" and not ("prefill" in terms and ("decode_gears" in terms or "decode_curves" in terms)):
        raise BadInput(
            f"{where}: expected prefill, and decode_gears or decode_curves; got {', '.join(terms) or 'none'}"
        )
    try:
        return COSTS[kind](**terms)
    except TypeError as error:
        raise BadInput(f"{where}: {error}") from None


def term(kind: str, name: str, value: Any, where: str) -> Any:
    """Return one checked part of a cost model."""
    if kind == "table" and name in ("prefill", "decode_gears"):
        return table(value, 2 if name == "prefill" else 4, where)
    if name == "decode_curves":
        return curves(value, where)
    if name == "token_gears":
        return [gear for (gear,) in table([[gear] for gear in value], 1, where)] if value else ()
    if (name == "rounded" and isinstance(value, bool)) or (name == "mixed_context" and value is None):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadInput(f"{where}: expected a number of seconds, got {value!r}")
    return value


def table(points: Any, width: int, where: str) -> list[tuple[float, ...]]:
    """Return the checked points of a curve: numbers, and rising in the first of them."""
    if not isinstance(points, (list, tuple)) or not points:
        raise BadInput(f"{where}: expected a list of points, got {points!r}")
    for k, point in enumerate(points):
        fine = isinstance(point, (list, tuple)) and min(2, width) <= len(point) <= width
        if not fine or any(type(x) not in (int, float) or not math.isfinite(x) for x in point):
            raise BadInput(f"{where}[{k}]: expected {'2 to ' if width > 2 else ''}{width} numbers, got {point!r}")
        if k and point[0] <= points[k - 1][0]:
            raise BadInput(f"{where}[{k}]: expected more than {points[k - 1][0]:g} first, got {point[0]:g}")
    return [tuple(point) for point in points]


def curves(given: Any, where: str) -> list[tuple[float, list[tuple[float, ...]]]]:
    """Return checked curves, each behind the number it is for, which rises."""
    if not isinstance(given, (list, tuple)) or any(
        not isinstance(one, (list, tuple)) or len(one) != 2 for one in given
    ):
        raise BadInput(f"{where}: expected a list of (rows, curve) pairs")
    found = [(one[0], table(one[1], 2, f"{where}[{k}]")) for k, one in enumerate(given)]
    table([[rows] for rows, _ in found], 1, where)
    return found


def mapping(cost: StepCost) -> dict[str, Any]:
    """Return a cost model as the mapping that `cost_from` builds it from, defaults left out."""
    for kind, known in COSTS.items():
        if type(cost) is known:
            parts = [f for f in fields(known) if not f.name.startswith("_")]
            values = {f.name: getattr(cost, f.name) for f in parts if getattr(cost, f.name) not in (f.default, [])}
            return {"kind": kind, **{name: listed(value) for name, value in values.items()}}
    raise BadInput(f"cost: a {type(cost).__name__} cannot be written down")


def listed(value: Any) -> Any:
    """Return a value with its tuples as lists, as YAML writes them."""
    return [listed(part) for part in value] if isinstance(value, (list, tuple)) else value
