"""Small faults in Python sources: find the places, describe them so that they can be found again, change the text.

A fault is described by module, function, text of the line, kind and number within the line. After a rename or a
rewrite it is found again in another module if function and line are still the same, or if the line occurs only once.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
               ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in")}  # fmt: skip
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # wording, and what mypy checks
DROPPED = (ast.AugAssign, ast.Assign, ast.Expr)


class Fault(NamedTuple):
    """One change of one line."""

    module: str  # path in the repository
    function: str  # qualified name, "" for the body of the module
    line: str  # text without indentation
    kind: str
    number: int  # among the places of this kind and this line in the function
    change: str  # before -> after


class Place(NamedTuple):
    """Where and how a fault changes the text of a module."""

    fault: Fault
    start: tuple[int, int]  # line from 1, column
    end: tuple[int, int]
    text: str


def sources(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Return the text of each module below folders of a repository."""
    found = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in found}


def changes(node: ast.AST, part: Callable[[ast.AST], str]) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield each change of a node: its kind, the node whose text is replaced, and the new text."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "negated condition", node.test, f"(not ({part(node.test)}))"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        left, right = part(node.left), part(node.comparators[0])
        yield "comparison", node, f"{left} {COMPARISONS[type(node.ops[0])][1]} {right}"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        yield "sign", node, f"({part(node.left)}) {sign} ({part(node.right)})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "and/or", node, f"({word.join(f'({part(value)})' for value in node.values)})"
    elif isinstance(node, ast.Name) and node.id in ("min", "max") and isinstance(node.ctx, ast.Load):
        yield "min/max", node, "max" if node.id == "min" else "min"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "off by one", node, repr(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", node, repr(node.value * 2 + 1)
    elif isinstance(node, DROPPED) and not isinstance(node.value, (ast.Constant, ast.Yield, ast.Await)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if not any(isinstance(each, (ast.Name, ast.Tuple)) for each in targets):  # a missing name is found at once
            yield "dropped statement", node, "pass"


def segment(lines: list[bytes], node: Any) -> str:
    """Return the text of a node."""
    first, last = node.lineno - 1, node.end_lineno - 1
    if first == last:
        return lines[first][node.col_offset : node.end_col_offset].decode()
    middle = [lines[first][node.col_offset :], *lines[first + 1 : last], lines[last][: node.end_col_offset]]
    return b"".join(middle).decode()


def places(module: str, text: str) -> Iterator[Place]:
    """Yield every place of a module where a fault can be planted."""
    lines = text.encode().splitlines(keepends=True)
    part = partial(segment, lines)
    counts: dict[tuple[str, str, str], int] = defaultdict(int)

    def walk(node: ast.AST, function: str, inside: bool) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, SKIPPED) or child in types_of(node):
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{function}.{child.name}".lstrip(".")
                yield from walk(child, name, inside or not isinstance(child, ast.ClassDef))
                continue
            for kind, old, new in changes(child, part) if inside else ():
                line = lines[old.lineno - 1].decode().strip()  # type: ignore[attr-defined]
                before = " ".join(part(old).split())
                key = (function, line, kind)
                fault = Fault(module, function, line, kind, counts[key], f"{before} -> {' '.join(new.split())}")
                counts[key] += 1
                start, end = (old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset)  # type: ignore
                yield Place(fault, start, end, new)
            yield from walk(child, function, inside)

    yield from walk(ast.parse(text), "", False)


def types_of(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node that are types or decorators."""
    own = [getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "decorator_list", [])]
    return [each for each in own if each is not None]


def planted(text: str, place: Place) -> str:
    """Return the text of a module with a fault."""
    lines = text.encode().splitlines(keepends=True)  # columns of ast count bytes
    (first, left), (last, right) = place.start, place.end
    middle = lines[first - 1][:left] + place.text.encode() + lines[last - 1][right:]
    return b"".join([*lines[: first - 1], middle, *lines[last:]]).decode()


def choose(modules: dict[str, str], count: int, seed: int) -> list[Fault]:
    """Return faults in random order: one of each module, then of all places with equal chances."""
    rng = random.Random(seed)
    of_module = {module: [place.fault for place in places(module, text)] for module, text in modules.items()}
    first = [rng.choice(faults) for faults in of_module.values() if faults]
    rest = sorted({fault for faults in of_module.values() for fault in faults} - set(first))
    chosen = (first + rng.sample(rest, max(0, min(len(rest), count - len(first)))))[:count]
    rng.shuffle(chosen)
    return chosen


def find_again(faults: list[Fault], modules: dict[str, str]) -> list[Optional[Place]]:
    """Return the place of each fault in these sources, None for one that cannot be planted any more."""
    every = [place for module, text in modules.items() for place in places(module, text)]
    by_line: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for place in every:
        by_line[place.fault.line, place.fault.change].append(place)
    return [nearest(fault, by_line[fault.line, fault.change]) for fault in faults]


def nearest(fault: Fault, same_line: list[Place]) -> Optional[Place]:
    """Return the one place among those with the same line that a description means."""
    name = fault.function.rpartition(".")[2]
    tries = [
        [place for place in same_line if place.fault == fault],
        [place for place in same_line if place.fault[:2] == fault[:2]],
        [place for place in same_line if place.fault.function.rpartition(".")[2] == name],
        same_line,
    ]
    return next((found[0] for found in tries if len(found) == 1), None)
