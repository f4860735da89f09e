"""Parameters of a cost model by name: a term, or a point of a curve.

`decode_live` is a term, `prefill.tokens.4096` the prefill curve of a cost model in parts at 4096 tokens, and
`host.step` a term of its part `host`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servesim.core import BadInput, StepCost
from servesim.costs.terms import terms_of, with_terms


def value_of(cost: StepCost, name: str) -> float:
    """Return the value of a parameter."""
    terms = terms_of(cost)
    term, point = split_name(terms, name)
    value = terms[term]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not point:
        return float(value)
    if not isinstance(value, (list, tuple)) or not all(isinstance(known, (list, tuple)) for known in value):
        raise BadInput(f"free: {name!r}: expected a term that is a number, or a table of points")
    found = {f"{known[0]:g}": known[1] for known in value}
    if point not in found:
        raise BadInput(f"free: {name!r}: expected a point of the table: {', '.join(f'{term}.{x}' for x in found)}")
    return float(found[point])


def split_name(terms: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return the term of a parameter, and the point of its curve if the name has one."""
    for term in terms:
        if name == term or name.startswith(f"{term}."):
            return term, name[len(term) + 1 :]
    raise BadInput(f"free: unknown parameter {name!r}; known: {', '.join(terms)}")


def with_values(cost: StepCost, names: Sequence[str], values: Sequence[float]) -> StepCost:
    """Return the cost model with some parameters changed."""
    terms, changes = terms_of(cost), dict[str, Any]()
    for name, value in zip(names, values):
        term, point = split_name(terms, name)
        if point:
            curve = changes.get(term, terms[term])
            changes[term] = [(x, float(value), *more) if f"{x:g}" == point else (x, y, *more) for x, y, *more in curve]
        else:
            changes[term] = float(value)
    changed: StepCost = with_terms(cost, changes)
    return changed
