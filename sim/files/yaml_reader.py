"""Read YAML with PyYAML, without the surprises of YAML 1.1.

- `1e-5` and `2E3` are numbers (1.1 requires a dot and a sign).
- `010` is 10 and `1:30` is text (1.1: 8 and 90).
- `no` and `off` are text; a boolean field accepts them as false (1.1: always false).
- `2026-11-15` is text (1.1: a date).
- `{a: 1, a: 2}` is an error with its line number (1.1: the last value wins).
- `{batch:64}` is an error: the space after the colon is missing (1.1: a key without a value).

A few lines of aliases can stand for billions of values. Size, depth and the number of values, with every alias
expanded, are limited before the values are built.

libyaml splits a text into its parts ten times faster than PyYAML's own code. A text that it may read differently, or
refuses, is read by PyYAML's code, so that values and messages are the same on every computer.
"""

from __future__ import annotations

import pickle
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

import yaml
from servesim.core import BadInput

from .read import PathLike, check_unicode, parse_integer, quote, read_bytes, show_path

MAX_YAML_BYTES = 2**20
MAX_DEPTH = 60
MAX_VALUES = 50_000  # with every alias expanded; a text counts once more per 100 characters
PATTERNS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:[0-9][0-9_]*|0o[0-7_]+|0x[0-9a-fA-F_]+)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
DIFFERENT = re.compile("[\t!?|>\ufeff]")  # signs that libyaml reads differently, in some places
SPECIAL_FLOATS = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


class Reader(yaml.SafeLoader):
    """PyYAML's safe loader with limits, and with other rules for numbers, booleans and dates."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._sizes: dict[int, int] = {}  # id of a node with an anchor -> values that it stands for

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read a value; count what it stands for."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before, mark = self._count, event.start_mark
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels", problem_mark=mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise yaml.MarkedYAMLError(problem="an alias inside its own anchor", problem_mark=mark)
            self._count += self._sizes[id(node)]
        else:
            self._count += 1 + (len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 0)
            if event.anchor is not None:
                self._sizes[id(node)] = self._count - before
        if self._count > MAX_VALUES:
            problem = f"more than {MAX_VALUES} values (aliases count in full)"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Build a value; a text that does not fit its tag is an error with its position."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            value = quote(node.value) if isinstance(node, yaml.ScalarNode) else "other values"
            reason = f" ({error})" if str(error).startswith("expected at most") else ""
            message = f"expected {kind}, got {value}{reason}"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark) from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a mapping. Its keys must be distinct, each with a colon and a space."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{quote(key.value)} appears twice", problem_mark=key.start_mark)
            if ":" in key.value and not key.style and value.start_mark.index == value.end_mark.index:
                name, _, rest = key.value.partition(":")
                message = f"expected `{name}: {rest}`, a space after the colon"
                raise yaml.MarkedYAMLError(problem=message, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def construct_int(reader: Reader, node: yaml.ScalarNode) -> int:
    """Return an integer; a leading zero does not make it octal."""
    text = reader.construct_scalar(node).replace("_", "").lower()
    return int(text, 0) if len(text) < 20 and ("0x" in text or "0o" in text) else parse_integer(text)


def construct_float(reader: Reader, node: yaml.ScalarNode) -> float:
    """Return a float, with .inf and .nan."""
    text = reader.construct_scalar(node).replace("_", "").lower()
    return SPECIAL_FLOATS[text] if text in SPECIAL_FLOATS else float(text)


Reader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] in ("null", "merge")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for name, (pattern, first) in PATTERNS.items():
    Reader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), list(first))
Reader.add_constructor("tag:yaml.org,2002:int", construct_int)
Reader.add_constructor("tag:yaml.org,2002:float", construct_float)

if yaml.__with_libyaml__:

    class FastReader(Reader, yaml.CSafeLoader):
        """The same reader; libyaml splits the text."""

        def __init__(self, text: str) -> None:
            super().__init__(text)
            yaml.CSafeLoader.__init__(self, text)

        check_event = yaml.CSafeLoader.check_event
        get_event = yaml.CSafeLoader.get_event
        peek_event = yaml.CSafeLoader.peek_event


def parse(text: str, where: str) -> Any:
    """Parse a YAML text; an error is one line that starts with `where` and the position."""
    try:
        return pickle.loads(parsed(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        message = f"{error.context or ''} {error.problem or ''}"
        raise BadInput(f"{where}: not valid YAML: {position}{_one_line(message)}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadInput(f"{where}: not valid YAML: {_one_line(str(error))}") from None


@lru_cache(maxsize=32)
def parsed(text: str) -> bytes:
    """Return the value of a text, pickled: a profile is read many times, and every reader may change its own copy."""
    value = load(text)
    if "\\u" in text or "\\U" in text:
        check_unicode(value)
    return pickle.dumps(value)


def load(text: str) -> Any:
    """Return the value of a text."""
    if yaml.__with_libyaml__ and not DIFFERENT.search(text):
        with suppress(yaml.YAMLError, ValueError):
            return yaml.load(text, FastReader)
    return yaml.load(text, Reader)


def read_yaml(path: PathLike) -> Any:
    """Read a YAML file."""
    name = show_path(path)
    try:
        text = read_bytes(path, MAX_YAML_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#x} at {error.start}"
        raise BadInput(f"{name}: expected text in UTF-8, got {byte}") from None
    return parse(text, name)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."
