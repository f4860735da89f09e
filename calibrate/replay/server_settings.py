"""Compare the settings of a scenario with those that a server tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servesim.config.scenario import Scenario
from servesim.engine.rules import rules_of
from servesim.runs.notes import note


def setting_notes(scenario: Scenario, server: Mapping[str, Any]) -> list[str]:
    """Return one line per setting in which a server differs; `server` is that of `read_settings`."""
    policy, engine = scenario.make_policy(), scenario.engine
    ours = {
        "block_size": ("engine.block_size", engine.block_size),
        "num_blocks": ("engine.num_blocks", engine.num_blocks),
        "prefix_cache": ("prefix cache", rules_of(policy).has_prefix_cache),
    }
    notes = [
        note("other setting", setting=setting, server=shown(server[name]), simulated=shown(simulated)).text
        for name, (setting, simulated) in ours.items()
        if name in server and server[name] != simulated
    ]
    version, rules = server.get("version"), scenario.policy.get("version") or getattr(policy, "version", None)
    if version is not None and scenario.policy["name"] == "vllm-v1" and version != rules:
        notes.append(note("other version", version=version, simulated=rules).text)
    return notes


def shown(value: Any) -> str:
    """Return a setting as text."""
    return ("on" if value else "off") if isinstance(value, bool) else f"{value:,}"
