"""The import graph of the library, read from its source: which module imports which, wherever the import stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = {  # folder of the checkout -> package
    "sim": "servesim", "policies": "servesim.policies", "calibrate": "servesim.calibrate", "traces": "servesim.traces",
}  # fmt: skip
Graph = Mapping[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Return every module of the library with its file."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").parts
            found[".".join([package, *(part for part in inner if part != "__init__")])] = path
    return found


def imported(name: str, path: Path, eager: bool = False) -> Iterator[str]:
    """Yield what a module imports, as absolute names; `eager`: only what is imported when the module is loaded."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set(lazy(tree)) if eager else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def lazy(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that loading a module does not run: bodies of functions, and blocks for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            yield from (inner for statement in node.body for inner in ast.walk(statement))


def graph(root: Path, eager: bool = False) -> dict[str, set[str]]:
    """Return the modules of the library that each module imports; a package counts where it is named itself."""
    known = modules(root)
    return {
        name: {other for other in imported(name, path, eager) if other in known and other != name}
        for name, path in known.items()
    }


def cycles(edges: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

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
                found.append(sorted(group))

    for name in edges:
        if name not in index:
            visit(name)
    return found


def unit_of(name: str, units: Mapping[str, object]) -> str:
    """Return the unit a module belongs to: the longest name in the table that it starts with."""
    inner = name.removeprefix("servesim").lstrip(".")
    while inner and inner not in units:
        inner = inner.rpartition(".")[0]
    return inner


def violations(edges: Graph, allowed: Mapping[str, set[str]]) -> list[str]:
    """Return the imports that the table of directions does not allow."""
    found = []
    for name, others in edges.items():
        here = unit_of(name, allowed)
        for other in sorted(others):
            there = unit_of(other, allowed)
            if there != here and there not in allowed.get(here, set()):
                found.append(f"{name} imports {other}")
    return found
