"""Find the notes of a run: settings and inputs that make its result differ from the real server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

from servesim.config.exported import refusals_of
from servesim.config.families import config_file_of
from servesim.config.layers import Tree, read_mapping
from servesim.config.memory import blocks_of_device
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.drafting import drafter_of
from servesim.costs.profile_verdict import DO_NOT_USE, verdict_on
from servesim.engine.rules import EngineRules, rules_of
from servesim.files.checked import format_bytes
from servesim.traces.reuse import seen_blocks
from servesim.traces.trace import Trace, has_field

from .notes import Note, note
from .pools import profiles_of, servers_of
from .simulate import load_trace

FIXED_BLOCKS = ("llm-serving",)  # policies of engines that do not compute the number of blocks from the memory


def run_warnings(scenario: Scenario, profile: Profile, trace: Optional[Trace]) -> list[Note]:
    """Return the warnings of a scenario, of all servers of a cluster. The trace is not read if it is None."""
    servers = servers_of(scenario, profile)
    return distinct(found for server in servers for found in server_warnings(server.scenario, server.profile, trace))


def distinct(notes: Iterable[Note]) -> list[Note]:
    """Return notes without repetitions, in their order."""
    found = list(notes)
    return [each for k, each in enumerate(found) if each not in found[:k]]


def server_warnings(scenario: Scenario, profile: Profile, trace: Optional[Trace]) -> list[Note]:
    """Return the warnings of one server."""
    found = [warn_refused(scenario), warn_default_blocks(scenario, profile), warn_bad_profile(profile)]
    found += [warn_not_simulated(scenario), warn_no_drafting(scenario, profile)]
    if trace is not None:
        rules = rules_of(scenario.make_policy())
        found.append(warn_answers(trace, rules))
        if not rules.has_prefix_cache:
            found.append(warn_unused_prefixes(trace, scenario.engine.block_size))
        elif scenario.trace is not None and not has_field(trace.requests, "content"):
            found.append(note("lengths only"))
    return [warning for warning in found if warning is not None]


def run_notes(scenario: Scenario, profile: Profile, trace: Trace) -> list[Note]:
    """Return the warnings of a scenario, and what to know about its profile."""
    return [*run_warnings(scenario, profile, trace), *source_notes(profiles_of(scenario, profile))]


def scenario_warnings(tree: Tree) -> list[Note]:
    """Return the warnings of a scenario that was run elsewhere; none if one of its files is gone."""
    try:
        scenario = scenario_from(tree)
        profile, trace = load_profile(scenario.profile), None if scenario.trace is None else load_trace(scenario)
        return run_warnings(scenario, profile, trace)
    except BadInput:  # `sim sweep DIR` may run on another machine
        return []


def source_notes(profiles: Iterable[Any]) -> list[Note]:
    """Return a note for each of these profiles that was derived, or measured on servesim's own torch backend."""
    notes: list[Note] = []
    for source in profiles:
        try:
            profile = source if isinstance(source, Profile) else load_profile(source)
        except BadInput:  # the profile of a stored run may be gone
            continue
        if profile.about.get("derived"):
            notes.append(note("derived profile", profile=profile.name, how=profile.about.get("how")))
        elif profile.about.get("backend") == "torch":
            notes.append(note("own backend", profile=profile.name))
    return distinct(notes)


def warn_refused(scenario: Scenario) -> Optional[Note]:
    """Warn if the real engine does not start with the settings of its policy."""
    policy = scenario.make_policy()
    refusals = refusals_of(scenario, policy)
    engine = f"real engine ({rules_of(policy).engine})"
    return note("refused", engine=engine, reasons="; ".join(refusals)) if refusals else None


def warn_default_blocks(scenario: Scenario, profile: Profile) -> Optional[Note]:
    """Warn if the number of KV blocks is the default, but the profile knows the memory of its device."""
    engine, policy = scenario.engine, scenario.policy["name"]
    if policy in FIXED_BLOCKS or engine.device_memory is not None or "num_blocks" in engine.model_fields_set:
        return None
    budget = blocks_of_device(profile.about, engine.block_size, engine.kv_cache_groups or [])
    file = None if scenario.server_config is None else config_file_of(policy)
    if budget is None and file is not None and file.without_blocks:
        text = file.without_blocks.format(blocks=engine.num_blocks)
        return note("server config", file=scenario.server_config, text=text)
    if budget is None or budget.blocks == engine.num_blocks:
        return None
    return note(
        "default blocks", blocks=engine.num_blocks, size=format_bytes(engine.num_blocks * budget.block_bytes),
        device=profile.about.get("device"), possible=budget.blocks, memory=budget.device // 2**20,
    )  # fmt: skip


def warn_not_simulated(scenario: Scenario) -> Optional[Note]:
    """Warn about settings in the configuration of the server that the run does not have."""
    path, file = scenario.server_config, config_file_of(scenario.policy["name"])
    if path is None or file is None:
        return None
    try:
        text = file.not_simulated(read_mapping(path, "configuration"), path)
    except BadInput:  # the file of a stored run may be gone
        return None
    return note("server config", file=path, text=text) if text else None


def warn_no_drafting(scenario: Scenario, profile: Profile) -> Optional[Note]:
    """Warn if the run has drafts, but nothing says how long a model takes to guess them. N-grams need no model."""
    section = scenario.drafts
    if section is None or section.drafting is not None or section.method == "ngram":
        return None
    known = drafter_of(profile, section.method, section.model or "")
    return note("no drafting time", profile=profile.name) if known is None else None


def warn_bad_profile(profile: Profile) -> Optional[Note]:
    """Warn if the verdict on a measured profile is not to use it. Costs in a scenario were not measured."""
    verdict = verdict_on(profile)
    if profile.path is None or verdict.grade != DO_NOT_USE:
        return None
    return note("bad profile", profile=profile.name, verdict=verdict.text, path=str(profile.path))


def warn_answers(trace: Trace, rules: EngineRules) -> Optional[Note]:
    """Warn if requests of a trace have several answers, and the rules do not say what the engine does with them."""
    if rules.sequence_groups or rules.splits_answers or not rules.engine or not has_field(trace.requests, "sampling"):
        return None
    return note("several answers", engine=rules.engine)


def warn_unused_prefixes(trace: Trace, block_size: int) -> Optional[Note]:
    """Warn if prompts of a trace share prefixes: an engine without a prefix cache computes every prompt completely."""
    if not has_field(trace.requests, "content"):
        return None
    seen, total = seen_blocks(trace.requests, block_size)
    return note("unused prefixes", hits=100 * seen / total, blocks=total) if seen else None
