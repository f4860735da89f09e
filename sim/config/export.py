"""Export a scenario to a real server: `sim export`, and `--emit-config` of sweeps and searches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from servesim.core import BadInput, field_values
from servesim.files.read import show_path
from servesim.files.write import yaml_text

from .exported import MODEL, Exported, note_on_blocks
from .llm_serving_yaml import from_llm_serving, to_llm_serving
from .overrides import Tree
from .scenario import Scenario, scenario_from
from .sglang_flags import sglang_command
from .vllm_flags import vllm_command

ADAPTER = "not a key of llm-serving; python -m servesim.calibrate.adapter runs the policy in the server"


def llm_serving_file(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the YAML configuration of llm-serving. What it cannot say is missing if the file is read back."""
    config = to_llm_serving(scenario.policy, scenario.engine.model_dump())
    again = scenario_from(from_llm_serving(config, "llm-serving"))
    policies = field_values(scenario.make_policy()), field_values(again.make_policy())
    missing = [f"policy.{name}={value}: {ADAPTER}" for name, value in policies[0].items() if value != policies[1][name]]
    defaults = type(scenario.engine)()
    for name in (
        "host_blocks",
        "decode_buckets",
        "reject_oversized",
        "start",
        "cold_start",
        "sampling",
        "max_model_len",
    ):
        value = getattr(scenario.engine, name)
        if value not in (getattr(again.engine, name), getattr(defaults, name)):
            missing.append(f"engine.{name}: not a key of llm-serving")
    notes = [] if model == MODEL else [f"model {model}: set model_name and the paths of the model"]
    notes += note_on_blocks(scenario, "num_blocks")
    return Exported("llm-serving, contest version of 2024", "llm-serving.yaml", yaml_text(config), notes, missing)


class Target(NamedTuple):
    """A server, and the policies that reproduce its scheduler."""

    policies: tuple[str, ...]
    export: Callable[..., Exported]


TARGETS = {
    "vllm": Target(("vllm-v1", "vllm", "vllm-chunked"), vllm_command),
    "sglang": Target(("sglang",), sglang_command),
    "llm-serving": Target(("llm-serving",), llm_serving_file),
}


def export_scenario(scenario: Scenario, target: str, model: str = MODEL) -> Exported:
    """Return the settings of a server that runs a scenario; raise BadInput for a policy of another engine."""
    policies, export = TARGETS[target]
    name = scenario.policy["name"]
    if name not in policies:
        fits = next((f"; export it to {other}" for other, (names, _) in TARGETS.items() if name in names), "")
        article = "an" if target[0] in "al" else "a"
        known = " and ".join(filter(None, (", ".join(policies[:-1]), policies[-1])))
        raise BadInput(f"policy {show_path(name)}: only {known} policies have {article} {target} configuration{fits}")
    return export(scenario, model)


def export_text(tree: Tree, target: str, model: str = MODEL, source: str = "a scenario") -> str:
    """Return the command or the configuration file of a server as text; `source` names where it comes from."""
    if target not in TARGETS:
        raise BadInput(f"server {target!r}: expected one of {', '.join(TARGETS)}")
    return export_scenario(scenario_from(tree), target, model).render(source)
