"""Recognise functions of llm-serving by their source, without importing it.

A digest covers the syntax tree of a function without docstrings, log calls and prints. So comments, formatting and log
texts may differ, and the digest does not depend on the version of Python.
"""

from __future__ import annotations

import ast
import importlib.util
from hashlib import sha256
from typing import Optional

# Functions that grouped_prefill.py replaces or relies on: module, class.function, digest in llm-serving of May 2024.
KNOWN = (
    ("mindspore_serving.worker.worker", "Worker._predict", "b867716b3f21b35a"),
    ("mindspore_serving.worker.worker", "Worker._get_valid_length", "f74b4e72524acff6"),
    ("mindspore_serving.worker.model_init_multimodel", "DisModel.call", "e416834f699a4362"),
    ("mindspore_serving.worker.model_init_multimodel", "DisModel._assemble_pa_full_inputs", "e2fc625b9eb64d53"),
    ("mindspore_serving.schedule.schedule", "Schedule.upate_entries_after_one_step", "c8b1d632ad6eb6ba"),
    ("mindspore_serving.agent.agent_multi_post_method", "WorkAgent.predict", "875feb794ffe3616"),
    ("mindspore_serving.agent.agent_multi_post_method", "WorkAgent.predict_for_kbk", "0091716ab3983caa"),
    ("mindspore_serving.agent.agent_multi_post_method", "WorkAgent.do_post_sampling", "85d02de43bcfe228"),
)


def unknown_functions() -> list[str]:
    """Return the known functions that this server does not have, or has with other code."""
    return [
        f"{name} in {module}" for module, name, known in KNOWN if digest_of(source_of(module), name) != known
    ]  # fmt: skip


def source_of(module: str) -> str:
    """Return the source text of a module that is not imported; empty if there is none."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return ""
        with open(spec.origin, encoding="utf-8") as file:
            return file.read()
    except (ImportError, OSError, ValueError):
        return ""


def digest_of(source: str, name: str) -> Optional[str]:
    """Return the digest of `Class.function` in a source text, None if the text does not define it."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return None
    for part in name.split("."):
        found = [
            node for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == part
        ]  # fmt: skip
        if not found:
            return None
        body = found[-1].body  # the last definition is the one that counts
    return sha256(flat_text(found[-1]).encode()).hexdigest()[:16]


def flat_text(node: ast.AST) -> str:
    """Return a syntax tree as text, the same in every version of Python."""
    parts = [type(node).__name__]
    for field, value in ast.iter_fields(node):
        values = value if isinstance(value, list) else [value]
        kept = [item for item in values if item is not None and not only_tells(item)]
        if kept:
            parts.append(field + "=" + ",".join(flat_text(x) if isinstance(x, ast.AST) else repr(x) for x in kept))
    return f"({' '.join(parts)})"


def only_tells(item: object) -> bool:
    """Whether a statement is a docstring, a log call or a print."""
    if not isinstance(item, ast.Expr):
        return False
    value = item.value
    if isinstance(value, ast.Constant):
        return True
    function = value.func if isinstance(value, ast.Call) else None
    if isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in ("logging", "logger", "print")
