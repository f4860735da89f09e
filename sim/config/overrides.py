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
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise BadInput(f"{path}: expected a mapping of scenario keys, got {type(tree).__name__}")
    if is_llm_serving(tree):
        tree = from_llm_serving(tree, str(path))
    return with_preset(tree)


def with_preset(tree: Tree) -> Tree:
    """Merge a scenario over the preset it names, by `preset:` or as its policy's name."""
    tree = dict(tree)
    base: Tree = {}
    if "preset" in tree:
        base = preset(str(tree.pop("preset")))
    return merge(base, tree)


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
    if "trace" in over and over["trace"] is not None:
        result.pop("workload", None) if "workload" not in over else None
    if "workload" in over and over["workload"] is not None:
        result.pop("trace", None) if "trace" not in over else None
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
