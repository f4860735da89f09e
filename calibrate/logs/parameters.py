"""Parameters of a cost model by name: a term, a point of a curve, or one of them in a part.

`decode_live` is a term, `prefill.tokens.4096` the prefill curve of a cost model in parts at 4096 tokens, and
`host.step` a term of its part `host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from servesim.core import BadInput, StepCost
from servesim.costs.parts import PartsCost


def value_of(cost: StepCost, name: str) -> float:
    """Return the value of a parameter."""
    value, rest = find_term(cost, name)
    if not isinstance(value, (list, tuple)):
        if rest or isinstance(value, bool) or value is None or is_dataclass(value):
            raise BadInput(f"free: {name!r}: expected a term that is a number")
        return float(value)
    for point in value:
        if not isinstance(point, (list, tuple)) or not isinstance(point[1], (int, float)):
            raise BadInput(f"free: {name!r}: expected a term that is a number, or a table of points")
        if f"{point[0]:g}" == rest:
            return float(point[1])
    prefix = name.removesuffix(f".{rest}") if rest else name
    raise BadInput(f"free: {name!r}: expected a point of the table: {', '.join(f'{prefix}.{p[0]:g}' for p in value)}")


def find_term(cost: Any, name: str) -> tuple[Any, str]:
    """Return the term that a name starts with, and the rest of the name."""
    term, rest = split_name(cost, name)
    known = [f.name for f in fields(cost) if f.name[0] != "_"] if is_dataclass(cost) else []
    if term not in known:
        raise BadInput(f"free: unknown parameter {name!r}; known: {', '.join(known)}")
    value: Any = getattr(cost, term)
    return find_term(value, rest) if is_dataclass(value) and rest else (value, rest)


def split_name(cost: Any, name: str) -> tuple[str, str]:
    """Return the field that a name starts with, and the rest; the field of the part `decode` has another name."""
    term, _, rest = name.partition(".")
    return "decodes" if term == "decode" and isinstance(cost, PartsCost) else term, rest


def with_values(cost: Any, names: Sequence[str], values: Sequence[float]) -> Any:
    """Return the cost model, or a part of it, with some parameters changed."""
    changes: dict[str, Any] = {}
    for name, value in zip(names, values):
        term, rest = split_name(cost, name)
        now = changes.get(term, getattr(cost, term))
        if not rest:
            changes[term] = float(value)
        elif is_dataclass(now):
            changes[term] = with_values(now, [rest], [value])
        else:
            changes[term] = [
                (point[0], float(value), *point[2:]) if f"{point[0]:g}" == rest else tuple(point) for point in now
            ]
    caches: dict[str, Any] = {f.name: {} for f in fields(cost) if f.name[0] == "_" and f.init}  # of the old values
    return replace(cost, **changes, **caches)
