"""Old names of scenario keys. Input may use either name; code uses the new one, written files keep the old one.

Trees that enter (YAML files, `--set`, mappings of the Python API, files read back) are renamed with NEW. Trees that are
written to a file are renamed with OLD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servesim.core import BadInput
from servesim.policies import OLD_FIELDS

Names = Mapping[str, Any]  # key -> its other name, or the names inside the section
ENGINE = {
    "prefill_gears": "prefill_buckets",
    "decode_gears": "decode_buckets",
    "lost_after": "client_timeout",
    "refuse": "reject_oversized",
}
ARRIVALS = {"swing": "amplitude", "think": "think_time", "dispatch": "send_overhead"}
CONTEST = {"dispatch": "send_overhead"}


def scenario_names(to_old: bool) -> Names:
    """Return the names of all sections of a scenario, in one direction."""

    def names(table: Mapping[str, str]) -> Names:
        return {new: old for old, new in table.items()} if to_old else table

    workload: dict[str, Any] = {"arrivals": names(ARRIVALS), "contest": names(CONTEST)}
    workload["mix"] = workload
    return {"engine": names(ENGINE), "policy": names(OLD_FIELDS), "workload": workload}


NEW, OLD = scenario_names(to_old=False), scenario_names(to_old=True)


def rename_keys(tree: Any, names: Any, where: str = "scenario: ") -> Any:
    """Return a scenario or a section of it with its keys renamed; both names of one key are an error."""
    if isinstance(tree, list):
        return [rename_keys(item, names, where) for item in tree]
    if not isinstance(tree, Mapping) or not isinstance(names, Mapping):
        return tree
    result = {}
    for key, value in tree.items():
        other = names.get(key)
        name = other if isinstance(other, str) else key
        if name != key and name in tree:
            raise BadInput(f"{where}{name}: expected one of {name} and {key} (its old name), got both")
        result[name] = rename_keys(value, other, f"{where}{key}.")
    return result


def rename_path(key: str, names: Any) -> tuple[str, Any]:
    """Return a key such as `policy.evicted` renamed, and the names inside its value."""
    parts = []
    for part in key.split("."):
        names = names.get(part) if isinstance(names, Mapping) else None
        parts.append(names if isinstance(names, str) else part)
    return ".".join(parts), names


def rename_settings(settings: Any, names: Names, where: str = "") -> Any:
    """Return a mapping of `section.key` to a value, a list of values or a range with its keys renamed."""
    if isinstance(settings, list):
        return [rename_settings(item, names, where) for item in settings]
    if not isinstance(settings, Mapping):
        return settings
    result: dict[str, Any] = {}
    for key, value in settings.items():
        name, inside = rename_path(str(key), names)
        if name != key and name in settings:
            raise BadInput(f"{where}{name}: expected one of {name} and {key} (its old name), got both")
        if isinstance(value, Mapping) and "choice" in value:
            result[name] = {**value, "choice": rename_keys(value["choice"], inside, f"{where}{key}.")}
        else:
            result[name] = rename_keys(value, inside, f"{where}{key}.")
    return result


def rename_sweep(tree: Mapping[str, Any], names: Names, where: str = "") -> dict[str, Any]:
    """Return the keys of a sweep or search file with the scenario keys inside them renamed."""
    result = dict(tree)
    if "base" in tree:
        result["base"] = rename_keys(tree["base"], names, f"{where}base.")
    for key in ("params", "baseline"):
        if key in tree:
            result[key] = rename_settings(tree[key], names, f"{where}{key}.")
    return result
