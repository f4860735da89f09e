"""How each policy was validated: its engine family, the recordings per version, and what it does not model.

RECORDINGS is the only place with these numbers; a test compares it with tests/recordings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.core.class_source import docstring
from servesim.files.read import read_json
from servesim.policies import POLICIES

from .registry import ENGINE, about_preset, make_policy, preset, presets
from .scenario import Scenario

RECORDINGS: dict[str, dict[str, int]] = {  # policy -> version of its engine -> recordings of that version
    "vllm-v1": {
        "0.11.0": 6, "0.14.0": 7, "0.19.0": 7, "0.23.0": 1, "0.24.0": 1, "0.27.0": 7, "0.32.0": 55,
    },
    "vllm": {"0.3.3": 1, "0.4.0": 2, "0.4.2": 5, "0.5.0": 2, "0.6.1": 8, "0.8.5": 1},
    "vllm-chunked": {"0.4.2": 1, "0.5.0": 0, "0.6.1": 1, "0.8.5": 1},
    "vllm-ascend": {"0.9.1": 2, "0.11.0": 10},
    "vllm-ascend-dynamic-batch": {"0.13.0": 5},
    "vllm-ascend-short-first": {"0.25.1rc1": 6},
    "vllm-ascend-batch-jobs": {"0.25.1rc1": 4},
    "vllm-ascend-profiling-chunk": {"0.25.1rc1": 3},
    "vllm-ascend-recompute": {"0.25.1rc1": 2},
    "vllm-ascend-balance": {"0.25.1rc1": 2},
    "vllm-mindspore": {"0.5.1": 7},
    "sglang": {"0.4.6": 34, "0.5.18": 22},
    "mindie": {"3.0.0": 35},
    "llm-serving": {"7342f33": 74},
    "sarathi": {"96f9911": 2},
    "sarathi-alternating": {"96f9911": 0},
    "static": {"96f9911": 2},
    "lightllm": {"4b037f68": 5},
    "splitfuse": {"8abdd98": 3},
    "orca": {"OSDI 2022": 0},
    "nano-vllm": {"bb823b3": 0},
    "mlfq": {"187a274": 0},
    "srpt": {"187a274": 0},
}  # fmt: skip


MODIFIED = ("moon", "yyds", "vidur")  # presets of engines that their authors changed: no recording shows their rules


class Family(NamedTuple):
    """Policies of engines with common code."""

    policies: tuple[str, ...]
    not_modelled: str


FAMILIES = {
    "vLLM V1": Family(
        ("vllm-v1",), "speculative decoding, LoRA, multimodal prompts, KV connectors, pipeline parallelism, a router"
    ),
    "vLLM v0": Family(
        ("vllm", "vllm-chunked"), "prefix cache, speculative decoding, LoRA, multimodal prompts, multi-step scheduling"
    ),
    "vLLM on Ascend": Family(
        (
            "vllm-ascend",
            "vllm-ascend-dynamic-batch",
            "vllm-ascend-short-first",
            "vllm-ascend-batch-jobs",
            "vllm-ascend-profiling-chunk",
            "vllm-ascend-recompute",
            "vllm-ascend-balance",
            "vllm-mindspore",
        ),
        "asynchronous scheduling except with short requests first, need_timing of profiling chunks, KV transfer, "
        "priorities with the prefix cache in vllm-mindspore, speculative decoding, LoRA, multimodal prompts",
    ),
    "SGLang": Family(("sglang",), "speculative decoding, LoRA, priorities, hierarchical cache, data parallelism"),
    "MindIE-LLM": Family(
        ("mindie",),
        "prefix cache, several answers (n > 1) and beam search, speculative decoding, P/D disaggregation, data "
        "parallelism, sequence and context parallelism",
    ),
    "llm-serving": Family(("llm-serving",), "versions after May 2024"),
    "Sarathi-Serve": Family(("sarathi", "sarathi-alternating", "static"), "pipeline parallelism"),
    "LightLLM": Family(("lightllm",), "prompt cache, versions after April 2024"),
    "others": Family(
        ("splitfuse", "orca", "nano-vllm", "mlfq", "srpt"), "pipeline parallelism, prefix cache of nano-vllm"
    ),
}


class Entry(NamedTuple):
    """A policy or a preset, as `sim policies list` shows it."""

    name: str
    about: str
    family: str
    version: str
    recordings: int
    validated_against: str
    not_modelled: str


def list_policies(unvalidated: bool) -> list[Entry]:
    """Return the policies, family by family; those that are not validated on request only."""
    entries = []
    for family, (policies, _) in FAMILIES.items():
        for name in policies:
            versions = [version for version, count in RECORDINGS[name].items() if count] or list(RECORDINGS[name])
            version = " to ".join(dict.fromkeys((versions[0], versions[-1])))
            about = docstring(POLICIES[name]).splitlines()[0]
            entries.append(entry(name, about, family, version, {"name": name}, sum(RECORDINGS[name].values())))
    return [row for row in entries if unvalidated or is_validated(row.validated_against)]


def list_presets(unvalidated: bool) -> list[Entry]:
    """Return the presets of the listed policies."""
    families = {policy: family for family, (policies, _) in FAMILIES.items() for policy in policies}
    entries = []
    for name in presets():
        settings = preset(name)["policy"]
        counts = RECORDINGS[settings["name"]]
        version = version_of(name, settings, counts)
        about = about_preset(name) or ""
        entries.append(entry(name, about, families[settings["name"]], version, settings, counts.get(version, 0)))
    return [row for row in entries if unvalidated or is_validated(row.validated_against)]


def version_of(name: str, settings: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """Return the engine version of a preset: a setting, part of its name, or the only version of its policy."""
    named = re.search(r"\d+(\.\d+)+", name)
    if name in MODIFIED:
        return "modified"
    version = str(settings.get("version") or (named[0] if named else next(iter(counts))))
    return next((known for known in counts if known.startswith(version)), version)


def entry(name: str, about: str, family: str, version: str, settings: Mapping[str, Any], count: int) -> Entry:
    validated = make_policy(settings).traits.validated_against
    return Entry(name, about, family, version, count, validated, FAMILIES[family].not_modelled)


def is_validated(text: str) -> bool:
    """Whether `Traits.validated_against` names more than source code."""
    return not text.startswith("not validated")


def describe_validation(scenario: Scenario) -> str:
    """Return what the decisions of a scenario's policy were compared with. A policy file is not loaded for this."""
    if scenario.policy["name"] == ENGINE:  # to ask for its version would start it
        return "the installed engine itself decides"
    try:
        known = scenario.policy_is_loadable
        text = scenario.make_policy().traits.validated_against if known else "own policy, not loaded"
        return text if scenario.proof is None else f"{text}; {describe_proof(scenario, scenario.proof)}"
    except BadInput as bad:
        return f"cannot be loaded now: {bad}"


def describe_proof(scenario: Scenario, file: str) -> str:
    """Return what a stored result of `sim policies prove` says about the policy of a scenario."""
    proof = read_json(file)
    if not isinstance(proof, dict) or not {"policy", "version", "text"} <= proof.keys():
        raise BadInput(f"proof: {file}: expected a file of `sim policies prove --store`")
    name, version = scenario.policy["name"], getattr(scenario.make_policy(), "version", "")
    if (proof["policy"], proof["version"]) != (name, version):
        return f"{file} is about {proof['policy']} {proof['version']}, not about {name} {version}"
    return str(proof["text"])
