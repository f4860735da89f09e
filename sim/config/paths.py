"""Relative paths in scenario and sweep files: trace, tokenizer, policy file, profile folder, lengths of a workload.

A file that another file names is searched in the folder of that file first, then in the working folder. So a scenario
works from every folder if its files lie at the same places relative to it; best.yaml is written like this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from servesim.costs.device_profile import bundled_profiles, exists

from .user_code import names_file

Tree = dict[str, Any]
Change = Callable[[str], str]  # a path -> the path that replaces it
PATHS = {
    "trace", "trace.path", "trace.tokenizer", "proof", "server_config", "workload.contest.lengths",
    "workload.contest.tokenizer", "workload.lengths.path", "workload.lengths.tokenizer",
}  # fmt: skip
PROFILES = {"profile", "profile.model", "profile.measured"}  # a path, or the name of a bundled profile
CODE = {  # a name, or FILE.py:NAME
    f"{section}{name}"
    for section in ("policy", "cluster.router", "cluster.decode_router")
    for name in ("", ".name", ".scheduler_cls")
}
PARTS = {"workload.mix": "workload", "cluster.pools": ""}  # list -> the section that each of its items is like


def resolve_paths(tree: Mapping[str, Any], folder: Path) -> Tree:
    """Return a scenario whose paths start at the working folder; `folder` is the folder of its file."""
    changed: Tree = change_paths(tree, lambda path: find_beside(path, folder))
    return changed


def find_beside(path: str, folder: Path) -> str:
    """Return a path in the folder if it exists there, else the path itself."""
    beside = os.path.join(folder, path)
    if os.path.isabs(path) or not exists(Path(beside)):
        return path
    short = os.path.normpath(beside)  # another file if `..` follows a link
    return short if exists(Path(short)) and os.path.samefile(short, beside) else beside


def relative_paths(tree: Mapping[str, Any], folder: Path) -> Tree:
    """Return a scenario with its paths relative to a folder, for a file in it. Absolute paths stay as they are."""
    start = os.path.realpath(folder)  # `..` of a linked folder is the parent of its target

    def change(path: str) -> str:
        return os.path.relpath(path, start) if not os.path.isabs(path) and exists(Path(path)) else path

    changed: Tree = change_paths(tree, change)
    return changed


def change_paths(value: Any, change: Change, key: str = "") -> Any:
    """Return a scenario, or the value of one of its keys, with every path in it replaced.

    Values of wrong types stay for the check of the scenario.
    """
    if isinstance(value, Mapping):
        return {name: change_paths(inner, change, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
    if isinstance(value, list):
        return [change_paths(item, change, PARTS.get(key, key)) for item in value]
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    if key in CODE and names_file(value):
        path, sign, name = value.rpartition(":") if ".py:" in value else (value, "", "")
        return f"{change(path)}{sign}{name}"
    return change(value) if key in PATHS or (key in PROFILES and value not in bundled_profiles()) else value


def paths_in(tree: Mapping[str, Any]) -> list[str]:
    """Return all paths in a scenario."""
    found: list[str] = []

    def note(path: str) -> str:
        found.append(path)
        return path

    change_paths(tree, note)
    return found


def names_relative_file(tree: Mapping[str, Any]) -> bool:
    """Whether a scenario names a file by a path that starts at the working folder."""
    return any(not os.path.isabs(path) and exists(Path(path)) for path in paths_in(tree))


def resolve_sweep_paths(tree: Mapping[str, Any], folder: Path) -> Tree:
    """Return the keys of a sweep or search file whose paths start at the working folder."""
    result = dict(tree)
    if isinstance(result.get("base"), Mapping):
        result["base"] = resolve_paths(result["base"], folder)
    for key in ("baseline", "params"):
        if key in result:
            result[key] = resolve_settings(result[key], folder)
    return result


def resolve_settings(settings: Any, folder: Path) -> Any:
    """Return settings such as `policy.name: [own.py:Mine]` with their paths; a list holds several grids."""
    if isinstance(settings, list):
        return [resolve_settings(grid, folder) for grid in settings]
    if not isinstance(settings, Mapping):
        return settings
    return {
        key: change_paths(value, lambda path: find_beside(path, folder), str(key)) for key, value in settings.items()
    }
