"""YAML as people mean it: PyYAML's reader with the surprises of YAML 1.1 taken out.

- `1e-5` and `2E3` are numbers (1.1 wants a dot and a sign).
- `010` is ten and `1:30` a text (1.1: eight, and ninety).
- `no` and `off` are texts, which a field that is a switch takes for a switch (1.1: always a switch).
- `2026-11-15` is a text (1.1: a date).
- `{a: 1, a: 2}` is an error that names the line (1.1: the last one wins).
- `{batch:64}` is an error that asks for the space (1.1: a key without a value).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Union

import yaml
from servesim.core import BadInput

RESOLVED = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:[0-9][0-9_]*|0o[0-7_]+|0x[0-9a-fA-F_]+)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
ENDLESS = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


class Reader(yaml.SafeLoader):
    """PyYAML's safe reader, its own ideas of numbers, switches and dates replaced."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a mapping; its keys must all be different, and each must have its colon and space."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            if ":" in key.value and not key.style and value.start_mark.index == value.end_mark.index:
                name, _, rest = key.value.partition(":")
                better = f"expected `{name}: {rest}`, a space after the colon"
                raise yaml.MarkedYAMLError(problem=better, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def whole(reader: Reader, node: yaml.ScalarNode) -> int:
    """Return a whole number; a zero in front does not make it octal."""
    text = reader.construct_scalar(node).replace("_", "").lower()
    return int(text, 0) if "0x" in text or "0o" in text else int(text)


def fraction(reader: Reader, node: yaml.ScalarNode) -> float:
    """Return any other number."""
    text = reader.construct_scalar(node).replace("_", "").lower()
    return ENDLESS[text] if text in ENDLESS else float(text)


Reader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] in ("null", "merge")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for name, (pattern, first) in RESOLVED.items():
    Reader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), list(first))
Reader.add_constructor("tag:yaml.org,2002:int", whole)
Reader.add_constructor("tag:yaml.org,2002:float", fraction)


def parse(text: str, where: str) -> Any:
    """Return what a text says; what is wrong with it is one line that begins with where it stands."""
    try:
        return yaml.load(text, Reader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        told = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        raise BadInput(f"{where}: not valid YAML: {place}{told}") from None
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
