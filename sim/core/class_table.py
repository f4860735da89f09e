"""Tables of classes by name. The module of a class is imported when the class is used; the names need no import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Optional, TypeVar

T = TypeVar("T")


class ClassTable(Mapping[str, type[T]]):
    """The classes of a package by name: the policies, the routers."""

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        """Create the table from MODULE.CLASS of each name; the modules are in the package."""
        self._package, self._places = package, places

    def __getitem__(self, name: str) -> type[T]:
        module, _, kind = self._places[name].rpartition(".")
        found: type[T] = getattr(import_module(f"{self._package}.{module}"), kind)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def name_of(self, kind: type[Any]) -> Optional[str]:
        """Return the name of a class; None: it is not in the table. Only a class of the same name is imported."""
        alike = (name for name, place in self._places.items() if place.rpartition(".")[2] == kind.__name__)
        return next((name for name in alike if self[name] is kind), None)
