"""The text of a first scenario file: every setting of a preset with its meaning, and requests to try it with."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from servesim.core import Policy
from servesim.core.fields import policy_fields
from servesim.files.checked import Keys
from servesim.files.write import yaml_text

from .families import tunings
from .layers import Layer, Tree, merge, set_key
from .memory import about_profile
from .registry import SPECULATIVE, about_preset, make_policy, preset
from .scenario import EngineConfig, Slo

GPU: Tree = {  # for engines that compute their KV blocks from the memory of the GPU
    "engine": {"device_memory": "H200", "gpu_memory_utilization": 0.9, "max_model_len": 4096},
    "profile": "h200-llama2-7b",
    "slo": {"ttft": 1000, "tpot": 50},
}
GPU_WORKLOAD = """\
workload:
  requests: 500
  arrivals: {kind: poisson, rate: 4}  # requests per second
  lengths:                            # tokens
    kind: lognormal
    prompt: {mean: 500, sd: 400, max: 1500}
    output: {mean: 150, sd: 100, max: 500}"""
CONTEST: Tree = {"profile": "ascend910b4-llama2-7b", "slo": {"ttft": 5000, "tpot": 200}}  # for llm-serving
CONTEST_WORKLOAD = """\
workload:
  contest: {X: 5, T: 300}  # the client of the contest: X requests per second for T seconds"""
STORED = "a bundled profile, or the folder that `sim calibrate endpoint` writes for your own server."
NAMED = """\
derived for this model and device (`sim models` lists both). The memory of the device gives the KV blocks.
# `sim calibrate endpoint` writes a folder with those of your own server."""
TEXT = """\
{about}
# Run it: `sim run FILE`. All keys: docs/scenario.md. Check a change: `sim config validate FILE`.

# Random requests. For your own, delete this section and write `trace: FILE` (formats: docs/traces.md).
{workload}

# The scheduler. `sim policies show {name}` has further settings, `sim policies list` other policies.
policy:
  name: {name}
{policy}

engine:
{engine}

# Step times: {profiles}
profile: {profile}

slo:
{slo}

# Several replicas of this server behind a router (docs/cluster.md):
# cluster: {{replicas: 4, router: least-requests}}
"""


def first_scenario(name: str, names: Mapping[str, Any]) -> str:
    """Return a scenario file with the settings of a preset, and the profile of `names`: model, device ..."""
    settings = preset(name)
    contest = settings["policy"]["name"] == "llm-serving"
    tree = merge(CONTEST if contest else GPU, settings)
    if names:
        tree = merge({**tree, "profile": {}}, {"profile": names})
        chosen = {key: value for key, value in defaults_on(name, names).items() if key != "engine.device_memory"}
        tree = Layer(chosen, are_settings=True).over(tree)  # the profile has the memory
    elif "device_memory" not in tree["engine"]:
        tree["engine"].pop("gpu_memory_utilization", None)
    return TEXT.format(
        about=textwrap.fill(about_preset(name) or name, 120, initial_indent="# ", subsequent_indent="# "),
        workload=CONTEST_WORKLOAD if contest else GPU_WORKLOAD,
        name=tree["policy"]["name"],
        policy=policy_keys(tree["policy"]),
        engine=section_keys(EngineConfig, tree["engine"]),
        profile=flow(tree["profile"]),
        profiles=NAMED if names else STORED,
        slo=section_keys(Slo, tree["slo"]),
    )


def default_server(tree: Tree) -> tuple[Tree, str]:
    """Return the keys of a server for a scenario that names none, and a line about it: vLLM's newest version.

    The profile is that of the scenario, or a bundled one. The KV cache fills the memory of its device.
    """
    profile, tuning = tree.get("profile", GPU["profile"]), tunings()["vllm"]
    server: Tree = {"preset": tuning.preset, "profile": profile}
    has_blocks = {"num_blocks", "device_memory"} & set(tree.get("engine") or {})
    for key, value in defaults_on(tuning.preset, profile).items():
        if not (has_blocks and key.startswith("engine.")):
            server = set_key(server, key, value)
    version = preset(tuning.preset)["policy"]["version"]
    name = profile if isinstance(profile, str) else "the named profile"
    given = "" if "profile" in tree else ", a bundled one"
    return (
        server,
        f"server: vLLM {version} with profile {name}{given}; choose with FILE, --preset or --policy, --profile",
    )


def defaults_on(name: str, profile: Any) -> Mapping[str, Any]:
    """Return the settings that the server of a preset chooses by the device of a profile."""
    found = next((tuning for tuning in tunings().values() if tuning.preset == name), None)
    return {} if found is None else found.defaults(about_profile(profile), ())


def policy_keys(settings: Mapping[str, Any]) -> str:
    """Return the fields of a policy as lines; of the fields that every policy has, only those that are set."""
    policy = make_policy(settings)
    helps = {
        name: field.help
        for name, field in policy_fields(type(policy)).items()
        if (name not in policy_fields(Policy) or name in settings) and name not in SPECULATIVE
    }
    return lines_of({name: getattr(policy, name) for name in helps}, helps)


def section_keys(section: type[Keys], values: Mapping[str, Any]) -> str:
    """Return the keys of a section as lines, in the order of its model."""
    described = {key: field.description or "" for key, field in section.model_fields.items()}
    return lines_of({key: values[key] for key in described if key in values}, described)


def lines_of(values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return one line per key, with aligned comments."""
    texts = {key: f"  {key}: {flow(value)}" for key, value in values.items()}
    width = max(map(len, texts.values()))
    return "\n".join(f"{text:{width}}  # {comments[key]}" for key, text in texts.items())


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    return yaml_text(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
