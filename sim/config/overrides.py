"""Scenarios as trees of mappings: read a file, merge trees, apply `--set`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from servesim.core import BadInput
from servesim.files.read import quote, show_path
from servesim.files.yaml_reader import parse, read_yaml

from .llm_serving_yaml import from_llm_serving, is_llm_serving
from .old_keys import NEW, rename_keys, rename_path
from .registry import preset

Tree = dict[str, Any]
MAX_SECTIONS = 20  # of a key; scenarios have fewer than ten levels


def read_scenario_file(path: Union[str, Path]) -> Tree:
    """Read a scenario file or an llm-serving configuration; load its preset first."""
    tree = read_mapping(path, "scenario")
    if is_llm_serving(tree):
        tree = from_llm_serving(tree, str(path))
    return with_preset(rename_keys(tree, NEW, f"{path}: "))


def read_mapping(path: Union[str, Path], what: str) -> Tree:
    """Read a YAML file of scenario, sweep or search keys."""
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise BadInput(f"{path}: expected a mapping of {what} keys, got {type(tree).__name__}")
    return tree


def with_preset(tree: Tree) -> Tree:
    """Load the preset that the key `preset` names; the other keys override it."""
    overrides = {key: value for key, value in tree.items() if key != "preset"}
    return merge(preset(str(tree["preset"])) if "preset" in tree else {}, overrides)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Return the base with a tree merged over it, key by key. If `over` names another policy, the old fields go."""
    return merge_renamed(rename_keys(base, NEW), rename_keys(over, NEW))


def merge_renamed(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Merge two trees of which neither has an old key name."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            other = key == "policy" and "name" in value and value["name"] != old.get("name")
            result[key] = dict(value) if other else merge_renamed(old, value)
        else:
            result[key] = value
    for source, other in (("trace", "workload"), ("workload", "trace")):
        if over.get(source) is not None and other not in over:
            result.pop(other, None)
    return result


def override(tree: Tree, settings: Sequence[str]) -> Tree:
    """Apply `section.key=value` settings; values are YAML."""
    for setting in settings:
        key, sign, text = setting.partition("=")
        option = f"--set {show_path(setting)}"
        if not sign or not key:
            raise BadInput(f"{option}: expected KEY=VALUE, e.g. policy.delay_factor=0.5")
        value = parse(text, option)
        try:
            tree = set_key(tree, key, value)
        except BadInput as bad:
            raise BadInput(f"{option}: {bad}") from None
    return tree


def set_key(tree: Tree, key: str, value: Any) -> Tree:
    """Return the tree with the value of `section.key` replaced; the key may be given by its old name."""
    if key.count(".") > MAX_SECTIONS:
        raise BadInput(f"expected at most {MAX_SECTIONS} sections, got {key.count('.')}")
    name, names = rename_path(key, NEW)
    return set_in(tree, name.split("."), rename_keys(value, names, f"{key}."))


def set_in(tree: Any, keys: Sequence[str], value: Any) -> Tree:
    """Return the tree with one value set; `policy: name` becomes a mapping when one of its fields is set."""
    tree = {"name": tree} if isinstance(tree, str) else tree
    if not isinstance(tree, Mapping):
        raise BadInput(f"expected a section that holds {'.'.join(keys)}, got {quote(tree)}")
    if len(keys) == 1:
        return {**tree, keys[0]: value}
    return {**tree, keys[0]: set_in(tree.get(keys[0]) or {}, keys[1:], value)}
