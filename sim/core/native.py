"""Compiled classes and their subclasses in Python: a mark for the compiler (mypyc), and fields with other defaults.

This module is never compiled and needs no package: `mypy_extensions` is not installed beside a live engine.
"""

from __future__ import annotations

from dataclasses import MISSING, Field
from types import GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_: Any) -> Any:
        """Mark a class that users may subclass. In plain Python it returns the class unchanged."""
        return lambda kind: kind


class NewDefault:
    """The default that a subclass in Python gives to a field of a compiled dataclass.

    As a simple class attribute it would hide the field: Python would store the value in the instance's dictionary, and
    compiled code would find no value.
    """

    def __init__(self, field: GetSetDescriptorType, default: Any) -> None:
        self.field = field
        self.default = default

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.default if instance is None else self.field.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        self.field.__set__(instance, value)


def keep_compiled_fields(kind: type[Any]) -> None:
    """Let a new subclass store the fields of its compiled bases where compiled code reads them."""
    for name, value in list(vars(kind).items()):
        field = compiled_field(kind, name)
        if field is None or isinstance(value, (GetSetDescriptorType, property)):
            continue
        if isinstance(value, MemberDescriptorType):  # of dataclass(slots=True)
            delattr(kind, name)
        elif not isinstance(value, Field):
            setattr(kind, name, NewDefault(field, value))
        elif value.default is not MISSING:  # `dataclass` would make it a class attribute, but not so with a factory
            default, value.default = value.default, MISSING
            value.default_factory = lambda default=default: default


def compiled_field(kind: type[Any], name: str) -> Optional[GetSetDescriptorType]:
    """Return a field of a compiled base of a class, or None if no compiled base has it."""
    for base in kind.__mro__[1:]:
        field = vars(base).get(name)
        if isinstance(field, GetSetDescriptorType) and name in getattr(base, "__dataclass_fields__", ()):
            return field
    return None
