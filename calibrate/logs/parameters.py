"""Parameters of a cost model by name: a term, or a point of a curve.

`decode_live` is a term, `prefill.tokens.4096` the prefill curve of a cost model in parts at 4096 tokens, and
`host.step` a term of its part `host`. `front_end.seconds`, `front_end.per_request` and `front_end.per_token` are times
of the front end: no part of a step. `prefill.cross + prefill.square` is one parameter for several terms: its value is
that of the first one, and the others keep their ratios to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from servesim.core import BadInput, StepCost
from servesim.costs.terms import terms_of, with_terms

FRONT_END_PRIORS = {  # seconds before a request reaches the scheduler, if the file of runs has no start value
    "seconds": 0.005,  # HTTP and process boundaries
    "per_request": 0.001,
    "per_token": 2e-6,  # a tokenizer that reads 500,000 tokens a second
}


def front_end_key(name: str) -> str:
    """Return the time of the front end that a parameter is, an empty text for one of the costs."""
    part, _, key = name.partition(".")
    if part == "front_end" and key not in FRONT_END_PRIORS:
        known = ", ".join(f"front_end.{key}" for key in FRONT_END_PRIORS)
        raise BadInput(f"free: unknown parameter {name!r}; known: {known}")
    return key if part == "front_end" else ""


def value_of(cost: StepCost, name: str) -> float:
    """Return the value of a parameter."""
    if "+" in name:
        first, *others = [value_of(cost, part.strip()) for part in name.split("+")]
        if first <= 0 < max(others):
            raise BadInput(f"free: {name!r}: expected a first term above 0")
        return first
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
    for name, value in each_term(cost, zip(names, values)):
        term, point = split_name(terms, name)
        if point:
            curve = changes.get(term, terms[term])
            changes[term] = [(x, float(value), *more) if f"{x:g}" == point else (x, y, *more) for x, y, *more in curve]
        else:
            changes[term] = float(value)
    changed: StepCost = with_terms(cost, changes)
    return changed


def each_term(cost: StepCost, parameters: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield the terms of all parameters with their new values."""
    for name, value in parameters:
        if "+" not in name:
            yield name, value
            continue
        first = value_of(cost, name)
        for term in map(str.strip, name.split("+")):
            yield term, value * value_of(cost, term) / first if first else value
