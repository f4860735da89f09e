"""The settings of one real server, as `sim export` prints them, and the settings of a scenario that they leave out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from servesim.core import Policy, field_values
from servesim.costs.device_profile import load_profile
from servesim.files.write import comment

from .scenario import EngineConfig, Scenario

MODEL = "MODEL"  # in a command, if the user names no model
MEMORY_KEYS = {"num_blocks", "device_memory", "gpu_memory_utilization", "model", "reserve"}
NO_SETTING = "the server has no such setting"
DESCRIBES = {  # keys that describe a server or its clients, but set nothing
    "front_end": "the delay of the front end is a property of the server",
    "empty_step": "a property of the server",
    "client_delay": "a property of the clients",
    "client_timeout": "a setting of the clients",
    "start": "warm up the server yourself",
    "cold_start": "a property of the device",
    "kv_cache_groups": "a property of the model",
}


@dataclass(frozen=True)
class Exported:
    """The settings of one server."""

    server: str  # name and version, e.g. vLLM 0.32
    file_name: str  # for `sim recommend`, which writes it beside best.yaml
    text: str  # shell command, YAML or JSON
    notes: Sequence[str] = ()
    not_expressed: Sequence[str] = field(default_factory=list)
    changes: Optional[Sequence[str]] = None  # lines of a diff with the command that was recorded, if there is one
    has_comments: bool = True  # JSON has none

    def render(self, source: str) -> str:
        """Return the text with comments: where it comes from, what to know, what is missing."""
        if not self.has_comments:
            return self.text
        lines = [f"{self.server}, from {source}", *self.messages]
        if self.changes is not None:
            lines += ["the recorded command with these changes:" if self.changes else "the recorded command, unchanged"]
            lines += self.changes
        return "".join(map(comment, lines)) + self.text

    @property
    def messages(self) -> list[str]:
        """What to know, and what is missing; for the user, if the text has no comments."""
        return [*self.notes, *(f"not expressed: {line}" for line in self.not_expressed)]


def flag_words(flags: Mapping[str, Any]) -> list[list[str]]:
    """Return the words of each flag. The value True is a flag without a value, None leaves the flag out."""
    given = {flag: value for flag, value in flags.items() if value is not None}
    return [[flag] if value is True else [flag, str(value)] for flag, value in given.items()]


def shell_command(words: Sequence[str], flags: Sequence[Sequence[str]], environment: Mapping[str, Any]) -> str:
    """Return a command with one flag per line."""
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in environment.items()]
    lines += [shlex.join(words), *(f"  {shlex.join(flag)}" for flag in flags)]
    return " \\\n".join(lines) + "\n"


def recorded_server(scenario: Scenario) -> Optional[Mapping[str, Any]]:
    """Return the server of `sim calibrate vllm` whose profile a scenario has: its command and its settings."""
    server = load_profile(scenario.profile).about.get("server")
    same = server is not None and server["command"] and server["policy"]["name"] == scenario.policy["name"]
    return server if same else None


def model_flags(scenario: Scenario, devices: str) -> dict[str, Any]:
    """Return the flags of how the model of the profile runs: on several devices, with 8-bit weights."""
    about = load_profile(scenario.profile).about
    degree = int(about.get("tensor_parallel") or 1)
    precisions = {"float8": "fp8"}  # other 8-bit weights need a model that was stored with them
    return {devices: degree if degree > 1 else None, "--quantization": precisions.get(str(about.get("dtype")))}


def split_flags(words: Sequence[str]) -> list[list[str]]:
    """Return the words of each flag in a command line."""
    groups: list[list[str]] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def setting_of(flag: Sequence[str]) -> str:
    """Return the setting of a flag: --no-x and --x set the same one, as --some_name and --some-name."""
    return flag[0].partition("=")[0].replace("_", "-").replace("--no-", "--", 1)


def changed_flags(
    words: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[list[list[str]], list[str]]:
    """Return the flags of a command with the new value of every setting that has changed, and the lines of a diff.

    `before` are the flags of the settings with which the command runs, also of those that the server itself has chosen.
    """
    old, new = ({setting_of(flag): flag for flag in flag_words(flags)} for flags in (before, after))
    changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
    result, diff = [], []
    for flag in split_flags(words):
        name = setting_of(flag)
        if name not in changed:
            result.append(flag)
            continue
        diff.append(f"- {shlex.join(flag)}")
        if name in new:
            result.append(new[name])
            diff.append(f"+ {shlex.join(new[name])}")
            changed.remove(name)
    added = [flag for name, flag in new.items() if name in changed]
    return [*result, *added], [*diff, *(f"+ {shlex.join(flag)}" for flag in added)]


def not_expressed(
    scenario: Scenario, policy: Policy, fields: Collection[str], why: Mapping[str, str], keys: Collection[str]
) -> list[str]:
    """Return what differs from the defaults, but is none of the expressed fields of a policy and keys of the engine."""
    defaults = field_values(type(policy)())
    missing = [
        f"policy.{name}={value}: {why.get(name, NO_SETTING)}"
        for name, value in field_values(policy).items()
        if name not in fields and value != defaults[name]
    ]
    return missing + changed_engine_keys(scenario.engine, keys)


def changed_engine_keys(engine: EngineConfig, expressed: Collection[str]) -> list[str]:
    """Return the keys of the engine section that are not expressed and differ from the defaults."""
    defaults = EngineConfig()
    return [
        f"engine.{name}: {DESCRIBES.get(name, NO_SETTING)}"
        for name in EngineConfig.model_fields
        if name in engine.model_fields_set and name not in expressed and name not in MEMORY_KEYS
        if getattr(engine, name) != getattr(defaults, name)
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
