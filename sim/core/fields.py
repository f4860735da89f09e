"""The fields of a policy. A field is declared once, and its type says which values it accepts:

    policy: Literal["fcfs", "priority"] = "fcfs"  # the comment is its help text
    max_num_seqs: Annotated[int, AtLeast(1)] = 128  # Int1 is a short name of this type

A field of a subclass with another default and a plain type keeps the choices and the range of its base class.
This module is never compiled: it reads annotations, which compiled classes do not keep.
"""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union, get_args, get_origin

from .class_source import class_source, is_compiled
from .limits import MAX_NUMBER, is_number

FIELDS: dict[type[Any], dict[str, PolicyField]] = {}  # of classes that were read: a sweep builds thousands of policies
CHECKED: dict[type[Any], tuple[PolicyField, ...]] = {}  # those with choices or a range
UNIONS = (Union, getattr(types, "UnionType", Union))  # Optional[int], and int | None since Python 3.10


class AtLeast(NamedTuple):
    """The range of a number: at least `minimum`, and below `below`, which is for fractions."""

    minimum: float
    below: Optional[float] = None

    def contains(self, value: Any) -> bool:
        """Whether a value is a number in this range. Larger numbers than MAX_NUMBER are not."""
        if type(value) not in (int, float) and not is_number(value):  # the first test is quick
            return False
        return bool(self.minimum <= value <= MAX_NUMBER and (self.below is None or value < self.below))


Int0 = Annotated[int, AtLeast(0)]
Int1 = Annotated[int, AtLeast(1)]
Float0 = Annotated[float, AtLeast(0)]
Fraction = Annotated[float, AtLeast(0, below=1)]


class PolicyField(NamedTuple):
    """A field of a policy: what it accepts, and what it means."""

    name: str
    types: tuple[Any, ...]  # several for a union; NoneType is the last one: None is accepted
    default: Any
    help: str
    choices: tuple[Any, ...] = ()  # all accepted values; empty: no list
    range: Optional[AtLeast] = None

    def expected(self, value: Any) -> str:
        """Return what this field expects instead of a value; empty if the value is one of its choices or in its range.

        A field with neither accepts all values: `config` and compiled classes check types.
        """
        if self.choices:
            return "" if value in self.choices else f"one of {', '.join(map(str, self.choices))}"
        if self.range is None or self.range.contains(value) or (value is None and type(None) in self.types):
            return ""
        minimum, below = self.range
        if is_number(value, minimum):
            return f"a fraction below {below:g}"
        return f"at most {MAX_NUMBER:g}" if is_number(value, minimum, math.inf) else f"at least {minimum:g}"


def check_fields(policy: Any) -> None:
    """Raise a ValueError that names the first field whose value is not one of its choices or not in its range."""
    kind = type(policy)
    for field in CHECKED.get(kind) or checked_fields(kind):
        value = getattr(policy, field.name)
        expected = field.expected(value)
        if expected:
            raise ValueError(f"{field.name}: expected {expected}, got {value!r}")


def checked_fields(kind: type[Any]) -> tuple[PolicyField, ...]:
    """Return the fields that have choices or a range. If a type has an error, only those of the base class."""
    for base in kind.__mro__:
        try:
            found = policy_fields(base)
        except Exception:  # `config` reports it; the type of a field that is set in Python may be unknown
            if is_compiled(base):
                raise
        else:
            CHECKED[kind] = tuple(field for field in found.values() if field.choices or field.range is not None)
            break
    return CHECKED[kind]


def policy_fields(kind: type[Any]) -> dict[str, PolicyField]:
    """Return all fields of a policy class by their names. Any error is possible: an annotation is an expression."""
    if kind in FIELDS:
        return FIELDS[kind]
    found: dict[str, PolicyField] = {}
    declared: dict[str, Field[Any]] = {}
    for base in reversed(kind.__mro__):
        for name, field in vars(base).get("__dataclass_fields__", {}).items():
            if declared.get(name) is not field:  # otherwise the class has it from a base
                declared[name] = field
                found[name] = read_field(base, field, found.get(name))
    FIELDS[kind] = {field.name: found[field.name] for field in fields(kind)} if found else {}
    return FIELDS[kind]


def read_field(owner: type[Any], field: Field[Any], inherited: Optional[PolicyField]) -> PolicyField:
    """Return a field as a class declares it. What the declaration does not say is inherited."""
    source = class_source(owner).fields.get(field.name)
    kinds: list[Any] = []
    choices: tuple[Any, ...] = () if inherited is None else inherited.choices
    limits = None if inherited is None else inherited.range
    for part in type_parts(declared_type(owner, field)):
        if isinstance(part, AtLeast):
            limits = part
        elif get_origin(part) is Literal:
            choices = get_args(part)
            kinds += map(type, choices)
        else:
            kinds.append(part)
    kinds.sort(key=lambda part: part is type(None))
    text = source.help if source is not None and source.help else "" if inherited is None else inherited.help
    return PolicyField(
        field.name,
        tuple(dict.fromkeys(kinds)),
        field.default if field.default_factory is MISSING else field.default_factory(),
        with_choices(text, choices),
        choices,
        limits,
    )


def declared_type(owner: type[Any], field: Field[Any]) -> Any:
    """Return the type of a field that a class declares."""
    text = class_source(owner).fields[field.name].type if is_compiled(owner) else field.type
    return eval(text, vars(sys.modules[owner.__module__])) if isinstance(text, str) else text


def type_parts(hint: Any) -> Iterator[Any]:
    """Yield the types of a union and the ranges of its numbers."""
    if get_origin(hint) is Annotated:
        yield from type_parts(hint.__origin__)
        yield from (part for part in hint.__metadata__ if isinstance(part, AtLeast))
    elif get_origin(hint) in UNIONS:
        for option in get_args(hint):
            yield from type_parts(option)
    else:
        yield hint


def with_choices(text: str, choices: tuple[Any, ...]) -> str:
    """Return a help text that names the choices."""
    names = ["null" if choice is None else str(choice) for choice in choices]
    if any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names):
        return text
    return ": ".join(filter(None, [text, ", ".join(names)]))
