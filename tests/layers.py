"""The import graph of the library, read from its source; imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Union

PACKAGES = {  # folder of the checkout -> package
    "sim": "servesim", "policies": "servesim.policies", "routers": "servesim.routers",
    "calibrate": "servesim.calibrate", "traces": "servesim.traces",
}  # fmt: skip
Graph = Mapping[str, set[str]]
Import = Union[ast.Import, ast.ImportFrom]


def modules(root: Path) -> dict[str, Path]:
    """Return the file of every module of the library."""
    result = {}
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").parts
            result[".".join([package, *(part for part in inner if part != "__init__")])] = path
    return result


def imported_names(name: str, path: Path, eager: bool = False) -> tuple[str, ...]:
    """Return the absolute names that a module imports; `eager`: only the imports that run when it is loaded."""
    return imports_of(name, path)[eager]


@cache  # most tests read the whole library
def imports_of(name: str, path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that a module imports at any time, and when it is loaded."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: list[str] = []
    eager: list[str] = []
    for node, is_lazy in imports_in(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            parents = package.split(".")
            parents_above = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*parents_above, *([node.module] if node.module else [])])
            found = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        names += found
        eager += [] if is_lazy else found
    return tuple(names), tuple(eager)


def imports_in(
    nodes: Sequence[ast.AST], is_lazy: bool = False
) -> Iterator[tuple[Union[ast.Import, ast.ImportFrom], bool]]:
    """Yield imports, with True for those in function bodies and TYPE_CHECKING blocks: they do not run at the start."""
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, is_lazy
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_later = is_function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):  # expressions hold no imports
            yield from imports_in(getattr(node, part, ()), is_lazy or (is_later and part == "body"))


def graph(root: Path, eager: bool = False) -> dict[str, set[str]]:
    """Return the modules of the library that each module imports; a package counts if it is named itself."""
    known = modules(root)
    return {
        name: {other for other in imported_names(name, path, eager) if other in known and other != name}
        for name, path in known.items()
    }


def cycles(edges: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                result.append(sorted(group))

    for name in edges:
        if name not in index:
            visit(name)
    return result


def unit_of(name: str, units: Mapping[str, object]) -> str:
    """Return the unit of a module: the longest name in the table that it starts with."""
    inner = name.removeprefix("servesim").lstrip(".")
    while inner and inner not in units:
        inner = inner.rpartition(".")[0]
    return inner


def violations(edges: Graph, allowed: Mapping[str, set[str]]) -> list[str]:
    """Return the imports that the table does not allow."""
    result = []
    for name, others in edges.items():
        unit = unit_of(name, allowed)
        for other in sorted(others):
            other_unit = unit_of(other, allowed)
            if other_unit != unit and other_unit not in allowed.get(unit, set()):
                result.append(f"{name} imports {other}")
    return result
