"""How each policy was validated: its engine family, the recordings per version, and what it does not model.

The numbers are in policies/*/__init__.py only; a test compares them with tests/recordings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from servesim.core import BadInput, Policy
from servesim.core.class_source import docstring
from servesim.engine.rules import rules_of
from servesim.files.read import read_json
from servesim.policies import FAMILIES, POLICIES, Validation

from .registry import ENGINE, about_preset, make_policy, preset, presets
from .scenario import Scenario

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


def validated_against(policy: Policy) -> str:
    """Return what the decisions of a policy were compared with. A subclass of a built-in one may decide otherwise."""
    names = {kind: name for name, kind in POLICIES.items()}
    base = next((kind for kind in type(policy).__mro__ if kind in names), None)
    if base is not None and base is not type(policy):
        return f"not validated: a subclass of {names[base]}"
    return rules_of(policy).validated_against


def entry(name: str, about: str, version: str, settings: Mapping[str, Any], count: int) -> Entry:
    family, validated = FAMILY_OF[settings["name"]], validated_against(make_policy(settings))
    return Entry(name, about, family, version, count, validated, VALIDATION[family].not_modelled)


def describe_validation(scenario: Scenario) -> str:
    """Return what the decisions of a scenario's policy were compared with. A policy file is not loaded for this."""
    if scenario.policy["name"] == ENGINE:  # to ask for its version would start it
        return "the installed engine itself decides"
    try:
        known = scenario.policy_is_loadable
        text = validated_against(scenario.make_policy()) if known else "own policy, not loaded"
        return text if scenario.proof is None else f"{text}; {describe_proof(scenario, scenario.proof)}"
    except BadInput as bad:
        return f"cannot be loaded now: {bad}"


def describe_policies(scenarios: Iterable[Scenario]) -> str:
    """Return the same for several scenarios, with the name of the policy if there are different ones."""
    texts = {str(scenario.policy["name"]): describe_validation(scenario) for scenario in scenarios}
    return "; ".join(texts.values() if len(texts) == 1 else (f"{name}: {text}" for name, text in texts.items()))


def describe_proof(scenario: Scenario, file: str) -> str:
    """Return what a stored result of `sim policies prove` says about the policy of a scenario."""
    proof = read_json(file)
    if not isinstance(proof, dict) or not {"policy", "version", "text"} <= proof.keys():
        raise BadInput(f"proof: {file}: expected a file of `sim policies prove --store`")
    name, version = scenario.policy["name"], getattr(scenario.make_policy(), "version", "")
    if (proof["policy"], proof["version"]) != (name, version):
        return f"{file} is about {proof['policy']} {proof['version']}, not about {name} {version}"
    return str(proof["text"])
