"""A scenario as the YAML configuration of llm-serving."""

from __future__ import annotations

from servesim.config.exported import MODEL, Exported, note_on_blocks
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import field_values
from servesim.files.write import yaml_text

from .config_file import from_llm_serving, to_llm_serving

ADAPTER = "not a key of llm-serving; python -m servesim.calibrate.adapter runs the policy in the server"


def llm_serving_file(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the YAML configuration of llm-serving. What it cannot say is missing if the file is read back."""
    config = to_llm_serving(scenario.policy, scenario.engine.model_dump())
    again = scenario_from(from_llm_serving(config, "llm-serving"))
    policies = field_values(scenario.make_policy()), field_values(again.make_policy())
    missing = [f"policy.{name}={value}: {ADAPTER}" for name, value in policies[0].items() if value != policies[1][name]]
    defaults = type(scenario.engine)()
    for name in (
        "host_blocks", "decode_buckets", "reject_oversized", "start", "cold_start", "sampling", "max_model_len",
    ):  # fmt: skip
        value = getattr(scenario.engine, name)
        if value not in (getattr(again.engine, name), getattr(defaults, name)):
            missing.append(f"engine.{name}: not a key of llm-serving")
    notes = [] if model == MODEL else [f"model {model}: set model_name and the paths of the model"]
    notes += note_on_blocks(scenario, "num_blocks")
    return Exported("llm-serving, contest version of 2024", "llm-serving.yaml", yaml_text(config), notes, missing)


EXPORTS = {"llm-serving": llm_serving_file}
