"""The policies and presets that `sim policies list` shows: family, version, recordings, and what is not modelled.

The numbers are in policies/*/__init__.py only; a test compares them with tests/recordings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from servesim.core.class_source import docstring
from servesim.policies import FAMILIES, POLICIES, Validation

from .registry import about_preset, make_policy, preset, presets
from .validation import validated_against

VALIDATION: dict[str, Validation] = {  # by the names of families in `sim policies list`
    name: row for family in FAMILIES for name, row in import_module(f"servesim.policies.{family}").VALIDATION.items()
}
FAMILY_OF = {policy: name for name, row in VALIDATION.items() for policy in row.recordings}
RECORDINGS = {policy: counts for row in VALIDATION.values() for policy, counts in row.recordings.items()}


class Entry(NamedTuple):
    """A policy or a preset, as `sim policies list` shows it."""

    name: str
    about: str
    family: str
    version: str
    recordings: int
    validated_against: str
    not_modelled: str


def list_policies() -> list[Entry]:
    """Return the policies, family by family."""
    entries = []
    for name, counts in RECORDINGS.items():
        versions = [version for version, count in counts.items() if count] or list(counts)
        version = " to ".join(dict.fromkeys((versions[0], versions[-1])))
        about = docstring(POLICIES[name]).splitlines()[0]
        entries.append(entry(name, about, version, {"name": name}, sum(counts.values())))
    return entries


def list_presets() -> list[Entry]:
    """Return the presets of the listed policies."""
    entries = []
    for name in presets():
        settings = preset(name)["policy"]
        counts = RECORDINGS[settings["name"]]
        version = version_of(name, settings, counts)
        entries.append(entry(name, about_preset(name) or "", version, settings, counts.get(version, 0)))
    return entries


def version_of(name: str, settings: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """Return the engine version of a preset: a setting, part of its name, or the only version of its policy."""
    named = re.search(r"\d+(\.\d+)+", name)
    if name in VALIDATION[FAMILY_OF[settings["name"]]].modified:
        return "modified"
    version = str(settings.get("version") or (named[0] if named else next(iter(counts))))
    return next((known for known in counts if known.startswith(version)), version)


def entry(name: str, about: str, version: str, settings: Mapping[str, Any], count: int) -> Entry:
    family, validated = FAMILY_OF[settings["name"]], validated_against(make_policy(settings))
    return Entry(name, about, family, version, count, validated, VALIDATION[family].not_modelled)
