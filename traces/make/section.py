"""A section of a configuration: its values by key, each checked, with messages that name the key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Optional

from servesim.core import BadInput
from servesim.files.read import shown

REQUIRED: Any = object()


class Section:
    """A mapping and where it stands."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise BadInput(f"{where}: expected keys and values, got {shown(values)}")
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def only(self, known: Iterable[str]) -> None:
        """Raise a BadInput at a key that is not on the list."""
        names = list(known)
        for key in self.values:
            if key not in names:
                raise BadInput(f"{self.where}: unknown key {shown(key)}: expected {', '.join(names)}")

    def bad(self, key: str, expected: str) -> BadInput:
        """Return the complaint about one value."""
        if key not in self.values:
            return BadInput(f"{self.where}.{key}: expected {expected}, got nothing")
        return BadInput(f"{self.where}.{key}: expected {expected}, got {shown(self.values[key])}")

    def section(self, key: str) -> Section:
        """Return a section inside this one."""
        if key not in self.values:
            raise self.bad(key, "keys and values")
        return Section(self.values[key], f"{self.where}.{key}")

    def number(self, key: str, default: Any = REQUIRED, least: float = 0.0, strict: bool = False) -> float:
        """Return a finite number of at least `least`, or above it."""
        value = self.values.get(key, default)
        if value is not REQUIRED and value is default:
            return float(default)
        if type(value) in (int, float) and least <= value < math.inf and not (strict and value == least):
            return float(value)
        raise self.bad(key, f"a number {'above' if strict else 'of at least'} {least:g}")

    def positive(self, key: str, default: Any = REQUIRED) -> float:
        """Return a number above 0."""
        return self.number(key, default, 0.0, strict=True)

    def whole(self, key: str, default: Any = REQUIRED, least: int = 1, most: int = 2**31 - 1) -> int:
        """Return a whole number."""
        value = self.values.get(key, default)
        value = int(value) if type(value) is float and value.is_integer() else value  # 1e4
        if type(value) is int and least <= value <= most:
            return value
        raise self.bad(key, f"a whole number from {least} to {most}")

    def choice(self, key: str, known: Iterable[str], default: Optional[str] = None) -> str:
        """Return a value on the list."""
        names = list(known)
        value = self.values.get(key, default)
        if value not in names:
            raise self.bad(key, f"one of {', '.join(names)}")
        return str(value)

    def numbers(self, key: str, least: float = 0.0) -> list[float]:
        """Return a list of numbers."""
        value = self.values.get(key)
        listed = value if isinstance(value, (list, tuple)) else ()
        if listed and all(type(one) in (int, float) and least <= one < math.inf for one in listed):
            return [float(one) for one in listed]
        raise self.bad(key, f"a list of numbers of at least {least:g}")

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        value = self.values.get(key)
        if isinstance(value, str) and value:
            return value
        raise self.bad(key, "a text")
