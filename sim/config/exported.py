"""The settings of one real server, as `sim export` prints them, and the settings of a scenario that they leave out."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from servesim.core import Policy, field_values
from servesim.files.write import comment

from .scenario import EngineConfig, Scenario

MODEL = "MODEL"  # in a command, if the user names no model
MEMORY_KEYS = {"num_blocks", "device_memory", "gpu_memory_utilization", "model", "reserve"}
DESCRIBES = {  # keys that describe a server or its clients, but set nothing
    "front_end": "the delay of the front end is a property of the server",
    "empty_step": "a property of the server",
    "client_timeout": "a setting of the clients",
    "start": "warm up the server yourself",
    "cold_start": "a property of the device",
}


@dataclass(frozen=True)
class Exported:
    """The settings of one server."""

    server: str  # name and version, e.g. vLLM 0.32
    file_name: str  # for a sweep that writes it beside best.yaml
    text: str  # shell command, YAML or JSON
    notes: Sequence[str] = ()
    not_expressed: Sequence[str] = field(default_factory=list)
    has_comments: bool = True  # JSON has none

    def render(self, source: str) -> str:
        """Return the text with comments: where it comes from, what to know, what is missing."""
        if not self.has_comments:
            return self.text
        return "".join(comment(line) for line in (f"{self.server}, from {source}", *self.messages)) + self.text

    @property
    def messages(self) -> list[str]:
        """What to know, and what is missing; for the user, if the text has no comments."""
        return [*self.notes, *(f"not expressed: {line}" for line in self.not_expressed)]


def shell_command(words: Sequence[str], flags: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Return a command with one flag per line. The value True is a flag without a value, None leaves the flag out."""
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in environment.items()]
    lines.append(shlex.join(words))
    for flag, value in flags.items():
        if value is not None:
            lines.append(f"  {flag}" if value is True else f"  {flag} {shlex.quote(str(value))}")
    return " \\\n".join(lines) + "\n"


def changed_fields(policy: Policy, expressed: Collection[str], why: Mapping[str, str]) -> list[str]:
    """Return the fields of a policy that are not expressed and differ from the defaults, with the reason."""
    defaults = field_values(type(policy)())
    return [
        f"policy.{name}={value}: {why.get(name, 'the server has no such setting')}"
        for name, value in field_values(policy).items()
        if name not in expressed and value != defaults[name]
    ]


def changed_engine_keys(engine: EngineConfig, expressed: Collection[str]) -> list[str]:
    """Return the keys of the engine section that are not expressed and differ from the defaults."""
    defaults = EngineConfig()
    return [
        f"engine.{name}: {DESCRIBES.get(name, 'the server has no such setting')}"
        for name in EngineConfig.model_fields
        if name not in expressed and name not in MEMORY_KEYS and getattr(engine, name) != getattr(defaults, name)
    ]


def note_on_blocks(scenario: Scenario, flag: str) -> list[str]:
    """Return a note if the scenario does not say how many KV blocks the device has."""
    engine = scenario.engine
    if engine.device_memory is not None or "num_blocks" in engine.model_fields_set:
        return []
    return [
        f"{flag}: {engine.num_blocks:,} KV blocks is the default of scenarios, not what fits on your device; "
        "set engine.device_memory and simulate again"
    ]


def refusals_of(scenario: Scenario, policy: Optional[Policy] = None) -> list[str]:
    """Return why the real engine of a scenario's policy does not start; empty if it starts, or if there is none."""
    engine = scenario.engine
    policy = scenario.make_policy() if policy is None else policy
    return policy.engine_refusals(engine.block_size, engine.max_model_len)
