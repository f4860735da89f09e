"""What the decisions of the policy of a scenario were compared with."""

from __future__ import annotations

from collections.abc import Iterable

from servesim.core import BadInput, Policy
from servesim.engine.rules import rules_of
from servesim.files.read import read_json
from servesim.policies import POLICIES

from .registry import ENGINE
from .scenario import Scenario


def validated_against(policy: Policy) -> str:
    """Return what the decisions of a policy were compared with. A subclass of a built-in one may decide otherwise."""
    names = [POLICIES.name_of(kind) for kind in type(policy).__mro__]
    base = next(filter(None, names), None)
    if base is not None and names[0] is None:
        return f"not validated: a subclass of {base}"
    return rules_of(policy).validated_against


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
