"""Read YAML with PyYAML, without the surprises of YAML 1.1.

- `1e-5` and `2E3` are numbers (1.1 requires a dot and a sign).
- `010` is 10 and `1:30` is text (1.1: 8 and 90).
- `no` and `off` are text; a boolean field accepts them as false (1.1: always false).
- `2026-11-15` is text (1.1: a date).
- `{a: 1, a: 2}` is an error with its line number (1.1: the last value wins).
- `{batch:64}` is an error: the space after the colon is missing (1.1: a key without a value).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Union

import yaml
from servesim.core import BadInput

PATTERNS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:[0-9][0-9_]*|0o[0-7_]+|0x[0-9a-fA-F_]+)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
SPECIAL_FLOATS = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


class Reader(yaml.SafeLoader):
    """PyYAML's safe loader with other rules for numbers, booleans and dates."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a mapping. Its keys must be distinct, each with a colon and a space."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} appears twice", problem_mark=key.start_mark)
            if ":" in key.value and not key.style and value.start_mark.index == value.end_mark.index:
                name, _, rest = key.value.partition(":")
                message = f"expected `{name}: {rest}`, a space after the colon"
                raise yaml.MarkedYAMLError(problem=message, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def construct_int(reader: Reader, node: yaml.ScalarNode) -> int:
    """Return an integer; a leading zero does not make it octal."""
    text = reader.construct_scalar(node).replace("_", "").lower()
    return int(text, 0) if "0x" in text or "0o" in text else int(text)


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


def parse(text: str, where: str) -> Any:
    """Parse a YAML text; an error is one line that starts with `where` and the position."""
    try:
        return yaml.load(text, Reader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        message = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        raise BadInput(f"{where}: not valid YAML: {position}{message}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: Union[str, Path]) -> Any:
    """Read a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except IsADirectoryError:
        raise BadInput(f"{path}: expected a YAML file, got a folder") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#x} at {error.start}"
        raise BadInput(f"{path}: expected text in UTF-8, got {byte}") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return parse(text, str(path))
