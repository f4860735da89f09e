"""The terms of a cost model by name: `decode_live` of a sum of terms, `decode.live` of one in parts.

A term is a number, a curve (points of a size and its seconds), a flag or padding buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from .parts import PART_FIELDS, PartsCost


def terms_of(cost: Any) -> dict[str, Any]:
    """Return all terms of a cost model; it has none if it is made of tables."""
    if isinstance(cost, PartsCost):
        parts = {part: public_fields(getattr(cost, field)) for part, field in PART_FIELDS.items()}
        return {f"{part}.{name}": value for part, terms in parts.items() for name, value in terms.items()}
    return public_fields(cost) if is_dataclass(cost) else {}


def with_terms(cost: Any, changes: Mapping[str, Any]) -> Any:
    """Return a cost model with other values of some terms."""
    if not isinstance(cost, PartsCost):
        return replace(cost, **changes)
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        part, _, term = name.partition(".")
        by_part.setdefault(PART_FIELDS[part], {})[term] = value
    return replace(cost, **{field: replace(getattr(cost, field), **terms) for field, terms in by_part.items()})


def public_fields(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass without its caches."""
    return {field.name: getattr(instance, field.name) for field in fields(instance) if not field.name.startswith("_")}
