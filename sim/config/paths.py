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
FILES_OF_WORKLOAD = {
    "contest": ("lengths", "tokenizer"),
    "lengths": ("path", "tokenizer"),
}  # section -> its keys with a path


def resolve_paths(tree: Mapping[str, Any], folder: Path) -> Tree:
    """Return a scenario whose paths start at the working folder; `folder` is the folder of its file."""
    return change_paths(tree, lambda path: find_beside(path, folder))


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

    return change_paths(tree, change)


def change_paths(tree: Mapping[str, Any], change: Change) -> Tree:
    """Return a scenario with every path in it replaced."""
    result = dict(tree)
    for key, replace in (
        ("trace", in_trace),
        ("policy", in_policy),
        ("profile", in_profile),
        ("proof", in_trace),
        ("server_config", in_trace),
        ("workload", in_workload),
        ("cluster", in_cluster),
    ):
        if key in result:
            result[key] = replace(result[key], change)
    return result


def in_section(section: Mapping[str, Any], keys: tuple[str, ...], change: Change) -> Tree:
    """Return a section with the paths under these keys replaced; wrong types stay for the check of the scenario."""
    return {key: change(value) if key in keys and usable(value) else value for key, value in section.items()}


def usable(path: Any) -> bool:
    return isinstance(path, str) and bool(path) and "\0" not in path


def in_trace(trace: Any, change: Change) -> Any:
    if isinstance(trace, Mapping):
        return in_section(trace, ("path", "tokenizer"), change)
    return change(trace) if usable(trace) else trace


def in_cluster(cluster: Any, change: Change) -> Any:
    if not isinstance(cluster, Mapping):
        return cluster
    changed = {**cluster, **({"router": in_policy(cluster["router"], change)} if "router" in cluster else {})}
    if isinstance(cluster.get("pools"), list):
        changed["pools"] = [
            change_paths(pool, change) if isinstance(pool, Mapping) else pool for pool in cluster["pools"]
        ]
    return changed


def in_policy(policy: Any, change: Change) -> Any:
    if isinstance(policy, Mapping):
        files = [key for key in ("name", "scheduler_cls") if names_file(policy.get(key))]
        return {**policy, **{key: in_policy(policy[key], change) for key in files}}
    if not names_file(policy) or not usable(policy):
        return policy
    path, sign, name = policy.rpartition(":") if ".py:" in policy else (policy, "", "")
    return f"{change(path)}{sign}{name}"


def in_profile(profile: Any, change: Change) -> Any:
    """The name of a bundled profile is no path. A profile by name may have the folder of a model."""
    if isinstance(profile, Mapping):
        return {key: in_profile(value, change) if key in ("model", "measured") else value
                for key, value in profile.items()}  # fmt: skip
    return change(profile) if usable(profile) and profile not in bundled_profiles() else profile


def in_workload(workload: Any, change: Change) -> Any:
    if not isinstance(workload, Mapping):
        return workload
    result = dict(workload)
    for section, keys in FILES_OF_WORKLOAD.items():
        if isinstance(result.get(section), Mapping):
            result[section] = in_section(result[section], keys, change)
    if isinstance(result.get("mix"), list):
        result["mix"] = [in_workload(part, change) for part in result["mix"]]
    return result


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
    return {key: resolve_value(str(key).split("."), value, folder) for key, value in settings.items()}


def resolve_value(keys: list[str], value: Any, folder: Path) -> Any:
    """Return the value of a setting, or its list of values, with the paths in it."""
    if isinstance(value, list):
        return [resolve_value(keys, choice, folder) for choice in value]
    if isinstance(value, Mapping) and "choice" in value:
        return {**value, "choice": resolve_value(keys, value["choice"], folder)}
    for key in reversed(keys):
        value = {key: value}
    changed: Any = resolve_paths(value, folder)
    for key in keys:
        changed = changed[key]
    return changed
