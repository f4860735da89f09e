"""Compare a policy with the scheduler of an installed engine, decision by decision.

Every scenario runs twice: the engine decides, then the policy. The clock, the costs and the requests are the same. So
the decisions are equal until the first one that follows another rule.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Optional

from servesim.config.registry import SPECULATIVE, make_policy, preset, presets
from servesim.config.scenario import Scenario
from servesim.core import BadInput, Policy
from servesim.core.policy import field_values
from servesim.runs.decision_log import InMemoryLog
from servesim.runs.simulate import simulate

from .policy import EnginePolicy
from .rules import version_numbers

COMPARED = ("t", "chunks", "preempted", "rejected", "cached", "free", "finished")  # of a line of the decision log
SHOWN = {"chunks": "batch", "preempted": "preempted", "cached": "cached", "free": "free blocks", "finished": "finished",
         "waiting": "waiting", "running": "running"}  # fmt: skip
PROVABLE = {"vllm-v1": "vllm"}  # policy: the engine whose rules it has
SPECULATING, WINDOWED, PIPED = 0.5, 0.4, 0.5  # of the random scenarios; the last one of those without the others
# windows of the KV cache groups; with mtp, the engine treats the group of its drafter in another way
GROUPS: list[list[Optional[int]]] = [[128, None], [None, 64], [None, 64, 64], [None, 50, 150], [64]]
LONGEST = 1000  # maximum tokens of prompt and output in random scenarios
COST = {
    "kind": "linear", "base": 0.005, "prefill_token": 0.0001, "decode_row": 0.0005, "context": 1e-7,
    "draft_token": 0.0002,
}  # fmt: skip


@dataclass
class Proof:
    """The result of a comparison."""

    policy: str
    version: str  # whose rules the policy applied
    engine: str  # name and version of the installed engine
    scenarios: int = 0
    steps: int = 0
    equal: int = 0  # of these steps
    asynchronous: int = 0  # steps that were decided before the last one had returned
    piped: int = 0  # steps of scenarios with pipeline parallelism
    drafted: int = 0  # steps of scenarios with speculative decoding
    windowed: int = 0  # steps of scenarios with KV cache groups
    cached: int = 0  # steps that used cached tokens
    preemptions: int = 0
    aborts: int = 0
    difference: Optional[dict[str, Any]] = None  # the first one: scenario, step, and the line of either log

    def text(self) -> str:
        """Return one line for reports."""
        return f"decisions checked against the installed {self.engine}: {self.equal:,} of {self.steps:,} steps"

    def as_json(self) -> dict[str, Any]:
        """Return the content of a stored result."""
        return {"text": self.text(), **asdict(self)}


def compared_policies(
    name: str, settings: Mapping[str, Any], engine: str, scheduler: Optional[str] = None
) -> tuple[Policy, EnginePolicy]:
    """Return a policy with the rules of the installed version, and the policy of the engine."""
    if PROVABLE.get(name) != engine:
        pairs = ", ".join(f"{policy} --engine {engine}" for policy, engine in PROVABLE.items())
        raise BadInput(f"policy {name} and engine {engine}: cannot be compared; possible: {pairs}")
    flags: dict[str, Any] = {"engine": engine, "scheduler_cls": scheduler}
    installed = EnginePolicy(**flags)
    release = version_numbers(installed.settings()["version"])
    known = known_rules(name)
    newest = max([0, *(k for k, tree in enumerate(known) if version_numbers(tree["version"]) <= release)])
    rules = known[newest]  # the rules since then, if there are new ones; of an older release, the oldest ones
    try:
        return make_policy({**rules, "version": ".".join(map(str, release)), **settings}), installed
    except BadInput as bad:
        if "policy.version" not in str(bad) or "version" in settings:
            raise
    return make_policy({**rules, **settings}), installed


def known_rules(name: str) -> list[dict[str, Any]]:
    """Return the policy sections of the presets of a policy, oldest version first."""
    sections = [preset(title)["policy"] for title in presets() if preset(title)["policy"]["name"] == name]
    return sorted(sections, key=lambda section: version_numbers(section["version"]))


def range_warning(name: str, policy: Policy, installed: EnginePolicy) -> Optional[str]:
    """Return a warning if the installed engine has another version than the rules of the policy."""
    release, rules = version_numbers(installed.settings()["version"]), version_numbers(policy_version(policy))
    if release == rules:
        return None
    oldest, newest = (str(known_rules(name)[index]["version"]) for index in (0, -1))
    is_known = version_numbers(oldest) <= release <= version_numbers(newest)
    reason = "you set this version" if is_known else f"only the rules of {oldest} to {newest} are known"
    return f"{installed.title} is compared with the rules of {policy_version(policy)}: {reason}"


def engine_policy(policy: Policy, installed: EnginePolicy) -> dict[str, Any]:
    """Return the installed engine with the settings of a policy, as a section of a scenario."""
    known, common = set(installed.settings()["flags"]), {field.name for field in fields(Policy)}
    values = {
        key: value for key, value in field_values(policy).items() if key not in {*common, *SPECULATIVE, "version"}
    }
    for field in fields(policy):
        if getattr(policy, field.name) != field.default and field.name in common:
            raise BadInput(f"policy.{field.name}: no engine has this setting, got {getattr(policy, field.name)!r}")
    flags = {("scheduling_policy" if key == "policy" else key): value for key, value in values.items()}
    flags = {key: value for key, value in flags.items() if key in known}
    chosen = {} if installed.scheduler_cls is None else {"scheduler_cls": installed.scheduler_cls}
    return {"name": "engine", "engine": installed.engine, **flags, **chosen}


def cases(policy: Policy, name: str, seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and the trees of scenarios: the presets of the policy, then random ones."""
    settings = {key: value for key, value in field_values(policy).items() if key not in SPECULATIVE}
    settings["name"] = name
    numbers = iter(range(count))
    for title in presets():
        tree = preset(title)
        if tree["policy"]["name"] == name and next(numbers, None) is not None:
            changed = {key: value for key, value in tree["policy"].items() if key not in ("name", "version")}
            scenario = random_scenario(random.Random(f"{seed} {title}"))
            yield f"settings of {title}", {**scenario, "policy": {**settings, **changed}}
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        tree = {**random_scenario(rng), "policy": random_settings(rng, settings)}
        if known_of(tree["policy"], "num_speculative_tokens", 1):
            add_features(rng, tree)
        yield f"random {number}", tree


def add_features(rng: random.Random, tree: dict[str, Any]) -> None:
    """Give some scenarios layers with windows, some speculative decoding, and some of the others stages."""
    policy, engine = tree["policy"], tree["engine"]
    if has_windows := rng.random() < WINDOWED:
        engine["kv_cache_groups"] = groups = rng.choice(GROUPS)
        engine["num_blocks"] = engine["num_blocks"] * (1 + len(groups)) // 2
        policy["prefix_cache_retention_interval"] = rng.choice([0, 0, None, 4 * engine["block_size"]])
    if rng.random() < SPECULATING:
        tree["speculative"] = drafts = random_speculation(rng, not has_windows)
        if drafts["method"] == "ngram":
            policy["async_scheduling"] = False
    elif not has_windows and rng.random() < PIPED:
        policy["pipeline_parallel_size"] = rng.choice([2, 3, 4])


def random_speculation(rng: random.Random, with_mtp: bool) -> dict[str, Any]:
    """Return a random section of speculative decoding. Several modules need blocks that are longer than the drafts."""
    methods = ["ngram", "draft_model", "eagle", "mtp" if with_mtp else "eagle"]
    method, tokens = rng.choice(methods), rng.choice([1, 2, 3, 4])
    section = {"method": method, "tokens": tokens, "acceptance": rng.choice([0.0, 0.4, 0.7, 1.0])}
    if method == "ngram":
        section["proposals"] = rng.choice([0.3, 0.8, 1.0])
    return {**section, "modules": rng.choice([1, tokens])} if method == "mtp" else section


def random_settings(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Return random settings of vLLM that its version has."""
    budget, seats = rng.choice([32, 64, 256, 2048]), rng.choice([2, 8, 16, 32])
    choices = {
        "max_num_seqs": seats,
        "max_num_active_seqs": rng.choice([None, None, seats // 2]),
        "max_num_batched_tokens": budget,
        "enable_chunked_prefill": budget < LONGEST or rng.random() < 0.5,
        "long_prefill_token_threshold": rng.choice([0, 0, 20, 100]),
        "long_prefill_token_threshold_adaptive": rng.random() < 0.2,
        "enable_prefix_caching": rng.random() < 0.7,
        "async_scheduling": rng.random() < 0.7,
        "scheduler_reserve_full_isl": rng.random() < 0.7,
        "watermark": rng.choice([0.0, 0.0, 0.05]),
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
    }
    chosen = dict(settings)
    for key, value in choices.items():
        if known_of(chosen, key, value):
            chosen[key] = value
    return chosen


def known_of(settings: dict[str, Any], key: str, value: Any) -> bool:
    """Whether the version in these settings has another one."""
    try:
        make_policy({**settings, key: value})
    except BadInput:
        return False
    return True


def random_scenario(rng: random.Random) -> dict[str, Any]:
    """Return a small server with an overload: preemptions, chunks, shared prompts, stop tokens, priorities, aborts."""
    block_size = rng.choice([4, 16, 16, 32])
    blocks = rng.choice([rng.randint(400, 800), rng.randint(800, 3000)]) // block_size
    rate = rng.choice([2, 10, 50])
    workload: dict[str, Any] = {
        "requests": rng.randint(40, 90),
        "arrivals": rng.choice([{"kind": "poisson", "rate": rate}, {"kind": "gamma", "rate": rate, "cv": 4}]),
        "lengths": {"prompt": [1, rng.choice([40, 200, 400])], "output": [1, rng.choice([20, 100, 200])]},
        "priorities": {0: 1, 1: 1, 2: 1},
    }
    if rng.random() < 0.5:
        workload["limit"] = rng.choice([120, 300])  # answers end by a stop token, those above it by the limit
    if rng.random() < 0.7:
        workload["prefixes"] = {"count": rng.randint(1, 4), "tokens": [10, 150], "share": 0.8}
    if rng.random() < 0.3:
        workload["sessions"] = {"turns": [1, 4], "think_time": 0.5}
    engine: dict[str, Any] = {"num_blocks": blocks, "block_size": block_size}
    engine["max_model_len"] = rng.choice([600, LONGEST])
    if rng.random() < 0.3:
        engine["client_timeout"] = rng.choice([0.3, 1, 3])
    return {"workload": workload, "engine": engine, "profile": COST, "seed": rng.randrange(1000)}


def policy_version(policy: Policy) -> str:
    """Return the version whose rules a policy applies."""
    return str(field_values(policy)["version"])


def compare(proof: Proof, label: str, scenario: Scenario, installed: EnginePolicy) -> None:
    """Run one scenario with both, and add its steps to the proof."""
    if scenario.policy["name"] != proof.policy:
        raise BadInput(f"{label}: policy.name: expected {proof.policy}, got {scenario.policy['name']!r}")
    policy = scenario.make_policy()
    other = scenario.model_copy(update={"policy": engine_policy(policy, installed)})
    theirs, ours = decisions(other), decisions(scenario)
    proof.scenarios += 1
    for number in range(max(len(theirs), len(ours))):
        rows = [lines[number] if number < len(lines) else {} for lines in (theirs, ours)]
        proof.steps += 1
        different = [key for key in COMPARED if rows[0].get(key) != rows[1].get(key)]
        if rows[1].get("rejected") and "free" in different:
            different.remove("free")  # when requests are aborted, the engine has not yet counted its free blocks
        if different:
            proof.difference = {
                "scenario": label, "step": number, "fields": different, "engine": rows[0], "policy": rows[1],
                "tree": scenario.model_dump(exclude_unset=True),
            }  # fmt: skip
            return
        proof.equal += 1
        proof.asynchronous += getattr(policy.rules(), "steps_in_flight", 1) > 1
        proof.piped += getattr(policy, "pipeline_parallel_size", 1) > 1
        proof.drafted += scenario.drafts is not None
        proof.windowed += scenario.engine.kv_cache_groups is not None
        proof.cached += any(tokens for _, tokens in rows[0].get("cached", ()))
        proof.preemptions += len(rows[0]["preempted"])
        proof.aborts += len(rows[0]["rejected"])


def decisions(scenario: Scenario) -> list[dict[str, Any]]:
    """Return the decision log of a scenario."""
    log = InMemoryLog()
    simulate(scenario, observers=[log])
    return log.rows
