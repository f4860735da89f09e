"""A scenario as a tree of plain mappings: read from a file, laid over another, changed by `--set`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from servesim.core import BadInput
from servesim.files.yaml_reader import parse, read_yaml

from .llm_serving_yaml import from_llm_serving, is_llm_serving
from .registry import preset

Tree = dict[str, Any]


def read_tree(path: Union[str, Path]) -> Tree:
    """Read a scenario file, ours or llm-serving's own, with the preset it names merged under it."""
    tree = read_mapping(path, "scenario")
    if is_llm_serving(tree):
        tree = from_llm_serving(tree, str(path))
    return with_preset(tree)


def read_mapping(path: Union[str, Path], what: str) -> Tree:
    """Read a YAML file of scenario, sweep or search keys."""
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise BadInput(f"{path}: expected a mapping of {what} keys, got {type(tree).__name__}")
    return tree


def with_preset(tree: Tree) -> Tree:
    """Merge a scenario over the preset that its key `preset` names."""
    over = {key: value for key, value in tree.items() if key != "preset"}
    return merge(preset(str(tree["preset"])) if "preset" in tree else {}, over)


def merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Return the base with a tree laid over it, key by key; another policy brings its own fields only."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            other = key == "policy" and "name" in value and value["name"] != old.get("name")
            result[key] = dict(value) if other else merge(old, value)
        else:
            result[key] = value
    for one, other in (("trace", "workload"), ("workload", "trace")):
        if over.get(one) is not None and other not in over:
            result.pop(other, None)
    return result


def override(tree: Tree, settings: Sequence[str]) -> Tree:
    """Apply `key.key=value` settings, the values read as YAML."""
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise BadInput(f"--set {setting}: expected KEY=VALUE, e.g. policy.delay_factor=0.5")
        value = parse(text, f"--set {setting}")
        try:
            tree = put(tree, key.split("."), value)
        except BadInput as bad:
            raise BadInput(f"--set {setting}: {bad}") from None
    return tree


def put(tree: Any, keys: Sequence[str], value: Any) -> Tree:
    """Return the tree with one value set; `policy: name` grows into a mapping when a field of it is set."""
    tree = {"name": tree} if isinstance(tree, str) else tree
    if not isinstance(tree, Mapping):
        raise BadInput(f"expected a section to set {'.'.join(keys)} in, got {tree!r}")
    if len(keys) == 1:
        return {**tree, keys[0]: value}
    return {**tree, keys[0]: put(tree.get(keys[0]) or {}, keys[1:], value)}
