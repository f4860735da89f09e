"""A scenario as MindIE's config.json."""

from __future__ import annotations

import json

from servesim.config.exported import MODEL, Exported, changed_engine_keys, note_on_blocks, refusals_of
from servesim.config.layers import read_mapping
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import field_values

from .config_file import from_mindie, to_mindie

NO_BASE = "only the keys of the scheduler; to change a copy of your own file, add --set server_config=config.json"
ASYNC = "start the server with MINDIE_ASYNC_SCHEDULING_ENABLE=1: asynchronous scheduling is not a key of config.json"


def mindie_file(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return MindIE's config.json: the file of the scenario with the changed keys, else all keys of the scheduler."""
    file, engine, policy = scenario.server_config, scenario.engine, field_values(scenario.make_policy())
    tree = {} if file is None else read_mapping(file, "configuration")
    base = tree if "BackendConfig" in tree else None
    config = to_mindie(policy, engine.model_dump(), base, None if model == MODEL else model)
    missing = changed_engine_keys(engine, {"block_size", "max_model_len", "host_blocks"})
    if not refusals_of(scenario):  # else `export_scenario` says why the server does not start
        again = field_values(scenario_from(from_mindie(config, file or "config.json")).make_policy())
        lost = [name for name, value in policy.items() if value != again[name] and name != "async_scheduling"]
        missing += [f"policy.{name}={policy[name]}: not a key of config.json" for name in lost]
    blocks = f"simulated with {engine.num_blocks:,} KV blocks and {engine.host_blocks:,} in host memory; compare them"
    notes = [
        *([NO_BASE] if base is None else []),
        *([ASYNC] if policy["async_scheduling"] else []),
        *(
            note_on_blocks(scenario, "npuMemSize")
            or [f"{blocks} with npuBlockNum and cpuBlockNum in the log of the server"]
        ),
    ]
    text = json.dumps(config, indent=4, ensure_ascii=False) + "\n"
    return Exported("MindIE 3.0.0", "mindie.json", text, notes, missing, has_comments=False)


EXPORTS = {"mindie": mindie_file}
