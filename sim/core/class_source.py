"""The source text of a policy class: its docstring, and the type and help of its fields.

A compiled class keeps neither docstring nor comments, and not all types. So they are read from the .py file, which is
installed beside the compiled module.
"""

from __future__ import annotations

import ast
import inspect
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple


class FieldSource(NamedTuple):
    """The source text of one field."""

    type: str
    help: str  # its comment: at the end of its line, or in the lines above it


class ClassSource(NamedTuple):
    """The source text of one class, without its bases."""

    doc: str
    fields: dict[str, FieldSource]


SOURCES: dict[type[Any], ClassSource] = {}  # of classes that were read


def is_compiled(kind: type[Any]) -> bool:
    """Whether a class comes from a compiled module."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not file.endswith(".py")


def docstring(kind: Any) -> str:
    """Return the docstring of a class, or an empty text."""
    return class_source(kind).doc if is_compiled(kind) else inspect.cleandoc(kind.__doc__ or "")


def class_source(kind: type[Any]) -> ClassSource:
    """Return the source text of a class. It is empty if there is no source file, for example in a notebook."""
    if kind not in SOURCES:
        SOURCES[kind] = read_class(kind)
    return SOURCES[kind]


def read_class(kind: type[Any]) -> ClassSource:
    """Read the source text of a class from its file."""
    package, _, name = kind.__module__.rpartition(".")
    if is_compiled(kind):  # its module may have the file name of the common library
        path = Path(sys.modules[package].__path__[0], f"{name}.py")
    else:
        path = Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    try:
        text = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(text))
    except (OSError, ValueError, SyntaxError):
        return ClassSource("", {})
    lines = text.splitlines()
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            declarations = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
            return ClassSource(
                ast.get_docstring(node) or "",
                {ast.unparse(field.target): field_source(field, lines) for field in declarations},
            )
    return ClassSource("", {})


def field_source(field: ast.AnnAssign, lines: list[str]) -> FieldSource:
    """Return the source text of a field; `lines` are those of its file."""
    _, _, comment = lines[(field.end_lineno or field.lineno) - 1].partition("  # ")
    above = takewhile(lambda line: line.lstrip().startswith("# "), reversed(lines[: field.lineno - 1]))
    return FieldSource(
        ast.unparse(field.annotation), comment or " ".join(line.lstrip(" #") for line in reversed(list(above)))
    )
