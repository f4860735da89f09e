"""The source text of a policy class: its docstring, and the type and help of its fields.

A compiled class keeps neither docstring nor comments, and not all types. So they are read from the .py file, which is
installed beside the compiled module.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple


class FieldSource(NamedTuple):
    """The source text of one field."""

    type: str
    help: str  # its trailing comment


class ClassSource(NamedTuple):
    """The source text of one class, without its bases."""

    doc: str
    fields: dict[str, FieldSource]


def is_compiled(kind: type[Any]) -> bool:
    """Whether a class comes from a compiled module."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not file.endswith(".py")


def docstring(kind: Any) -> str:
    """Return the docstring of a class, or an empty text."""
    return class_source(kind).doc if is_compiled(kind) else inspect.cleandoc(kind.__doc__ or "")


def field_help(kind: type[Any]) -> dict[str, str]:
    """Return the help of every field that has one, also of inherited fields."""
    sources = [class_source(base) for base in reversed(kind.__mro__)]
    return {name: field.help for source in sources for name, field in source.fields.items() if field.help}


def field_types(kind: type[Any]) -> dict[str, Any]:
    """Return the type of every field, also of inherited ones. Any error is possible: an annotation is an expression."""
    result: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if is_compiled(base):
            names = vars(sys.modules[base.__module__])
            result.update({name: eval(field.type, names) for name, field in class_source(base).fields.items()})
        else:
            result.update(inspect.get_annotations(base, eval_str=True))
    return result


@lru_cache(maxsize=256)
def class_source(kind: Any) -> ClassSource:
    """Return the source text of a class. It is empty if there is no source file, for example in a notebook."""
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
    return FieldSource(ast.unparse(field.annotation), comment)
