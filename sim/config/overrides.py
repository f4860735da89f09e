"""Scenarios as trees of mappings: read a file, merge trees, apply `--set`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from servesim.core import BadInput
from servesim.files.read import quote, read_json, show_path
from servesim.files.yaml_reader import parse, read_yaml

from .families import config_files
from .paths import resolve_paths, resolve_sweep_paths
from .registry import preset

Tree = dict[str, Any]
EXCLUSIVE = (  # a key in a tree that is merged over another one removes the other key there
    ("trace", "workload"), ("workload", "trace"), ("num_blocks", "device_memory"), ("device_memory", "num_blocks"),
)  # fmt: skip
SHORT_FORMS = {"policy": "name", "trace": "path"}  # sections that may be a text -> the key that the text stands for
TRACE_ENDINGS = (".csv", ".jsonl", ".parquet")  # of file names
MAX_SECTIONS = 20  # of a key; scenarios have fewer than ten levels


def read_scenario_file(path: Union[str, Path]) -> Tree:
    """Read a scenario file or the configuration of a server; load its preset first. Paths: see paths.py."""
    tree = read_mapping(path, "scenario")
    if any(file.fits(tree) for file in config_files()):
        return {"server_config": str(path), **server_scenario(tree, path)}
    return with_preset(resolve_paths(tree, Path(path).parent))


def server_scenario(tree: Tree, path: Union[str, Path]) -> Tree:
    """Return the scenario of a server's own configuration."""
    known = config_files()
    for file in known:
        if file.fits(tree):
            return file.scenario(tree, str(path))
    raise BadInput(f"{path}: expected {' or '.join(file.title for file in known)}")


def read_sweep_file(path: Union[str, Path], what: str = "sweep") -> Tree:
    """Read the keys of a sweep or search file."""
    return resolve_sweep_paths(read_mapping(path, what), Path(path).parent)


def read_mapping(path: Union[str, Path], what: str) -> Tree:
    """Read a YAML file of scenario, sweep or search keys."""
    if str(path) == "-":
        raise BadInput(f"-: expected a {what} file; only a trace is read from standard input, with --trace -")
    if str(path).lower().removesuffix(".gz").endswith(TRACE_ENDINGS):
        raise BadInput(f"{path}: expected a {what} file (YAML), not a trace; for a trace use --trace {path}")
    tree = read_json(path) if str(path).endswith(".json") else read_yaml(path)  # YAML does not allow all tabs of JSON
    if not isinstance(tree, dict):
        found = "an empty file" if tree is None else type(tree).__name__
        raise BadInput(f"{path}: expected a mapping of {what} keys, got {found}")
    return tree


def with_preset(tree: Tree) -> Tree:
    """Load the preset that `preset` names, then the file of `server_config`; the other keys override them."""
    overrides = {key: value for key, value in tree.items() if key != "preset"}
    base = preset(str(tree["preset"])) if "preset" in tree else {}
    file = tree.get("server_config")
    if isinstance(file, str):
        base = merge(base, server_scenario(read_mapping(file, "configuration"), file))
    return merge(base, overrides)


def as_section(key: str, value: Any) -> Any:
    """Return `policy: NAME` and `trace: FILE` as mappings; other values unchanged."""
    return {SHORT_FORMS[key]: value} if key in SHORT_FORMS and isinstance(value, str) else value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Return the base with a tree merged over it, key by key. If `over` names another policy, the old fields go."""
    result = dict(base)
    for key, value in over.items():
        old = as_section(key, result.get(key))
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            other = key == "policy" and "name" in value and value["name"] != old.get("name")
            result[key] = dict(value) if other else merge(old, value)
        else:
            result[key] = value
    for key, other in EXCLUSIVE:
        if over.get(key) is not None and other not in over:
            result.pop(other, None)
    return result


def override(tree: Tree, settings: Sequence[str]) -> Tree:
    """Apply `section.key=value` settings; values are YAML."""
    for setting in settings:
        key, sign, text = setting.partition("=")
        option = f"--set {show_path(setting)}"
        if not sign or not key:
            raise BadInput(f"{option}: expected KEY=VALUE, e.g. policy.max_num_seqs=64")
        value = parse(text, option)
        try:
            tree = set_key(tree, key, value)
        except BadInput as bad:
            raise BadInput(f"{option}: {bad}") from None
    return tree


def set_key(tree: Tree, key: str, value: Any) -> Tree:
    """Return the tree with the value of `section.key` replaced."""
    if key.count(".") > MAX_SECTIONS:
        raise BadInput(f"expected at most {MAX_SECTIONS} sections, got {key.count('.')}")
    return set_in(tree, key.split("."), value)


def set_in(tree: Any, keys: Sequence[str], value: Any) -> Tree:
    """Return the tree with one value set."""
    if not isinstance(tree, Mapping):
        raise BadInput(f"expected a section that holds {'.'.join(keys)}, got {quote(tree)}")
    if len(keys) == 1:
        return {**tree, keys[0]: value}
    section = as_section(keys[0], tree.get(keys[0]) or {})
    return {**tree, keys[0]: set_in(section, keys[1:], value)}


def apply_assignment(base: Tree, assignment: Mapping[str, Any]) -> Tree:
    """Return the base scenario with an assignment applied; another policy name drops the fields of the old policy."""
    tree = {**base, "policy": as_section("policy", base.get("policy") or {"name": "llm-serving"})}
    for key, value in sorted(assignment.items(), key=nesting_order):
        if key in ("policy", "policy.name"):
            tree = merge(tree, {"policy": value if isinstance(value, Mapping) else {"name": value}})
        elif key in ("trace", "workload"):
            tree = {k: v for k, v in tree.items() if k not in ("trace", "workload")} | {key: value}
        elif "." not in key and isinstance(value, Mapping):
            tree = merge(tree, {key: value})
        else:
            tree = set_key(tree, key, value)
    return tree


def nesting_order(item: tuple[str, Any]) -> tuple[int, int]:
    """Sort sections before their keys, and a policy's name before its fields."""
    return (item[0].count("."), int(item[0] != "policy.name"))
