"""The free numbers of a cost model: by name, taken out as a list and put back.

A name is a term of the cost model (`decode_live`), or a point of one of its tables by its place on the axis
(`decode_gears.64` is the base of the gear of 64 rows, `prefill.4096` the curve at 4096 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from servesim.core import BadInput, StepCost
from servesim.costs.mapping import COSTS


def value_of(cost: StepCost, name: str, where: str = "free") -> float:
    """Return a parameter's value."""
    term, _, place = name.partition(".")
    known = [f.name for kind in COSTS.values() if type(cost) is kind for f in fields(kind) if f.name[0] != "_"]
    if term not in known:
        raise BadInput(f"{where}: unknown parameter {name!r}; known: {', '.join(known)}")
    found: Any = getattr(cost, term)
    if not isinstance(found, (list, tuple)):
        if place or isinstance(found, bool) or found is None:
            raise BadInput(f"{where}: {name!r}: expected a term that is a number")
        return float(found)
    for point in found:
        if f"{point[0]:g}" == place:
            return float(point[1])
    places = ", ".join(f"{term}.{point[0]:g}" for point in found)
    raise BadInput(f"{where}: {name!r}: expected a point of the table: {places}")


def with_values(cost: StepCost, names: Sequence[str], values: Sequence[float]) -> StepCost:
    """Return the cost model with some parameters changed."""
    changes: dict[str, Any] = {}
    for name, value in zip(names, values):
        term, _, place = name.partition(".")
        if not place:
            changes[term] = float(value)
            continue
        points = changes.get(term, getattr(cost, term))
        changes[term] = [
            (point[0], float(value), *point[2:]) if f"{point[0]:g}" == place else tuple(point) for point in points
        ]
    if hasattr(cost, "_lines"):
        changes["_lines"] = {}  # what it remembers is of the old values
    return replace(cost, **changes)  # type: ignore[type-var]
