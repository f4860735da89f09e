"""Random scenarios over all policies, and one per preset: costs, requests, limits, clusters of all kinds.

A case is data that JSON can hold, so that another build of the product can run it: tools/compare_builds.py.
`make test` compares 100 of them, plain and compiled, with and without observers, and `make test-all` 500. For 2,000:

    SCENARIOS=2000 python -m pytest tests/compiled/test_same_results.py
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from typing import Any, Optional

from servesim.config.registry import SPECULATIVE, make_policy, preset, presets
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.imported_tables import VidurCost
from servesim.engine.rules import rules_of
from servesim.policies import POLICIES
from servesim.traces.trace import Trace, table_of

from .policy_values import VALUES, accepted, known_fields, random_fields
from .random_clusters import random_cluster
from .random_requests import Row, add_answers, client_request, random_requests

COUNT = int(os.environ.get("SCENARIOS", "500"))
WITH_MODEL = ("h200-llama2-7b", "ascend910b4-llama2-7b")
BUNDLED = (*WITH_MODEL, "cpu-tiny-kbk")
OFTEN = ("version", "async_scheduling", "pipeline_parallel_size", "append_rule")  # fields that change much
OWN = {"engine", "policy", "profile"}  # keys of a pool that differ from those of the scenario
ROUND = [*POLICIES, *["vllm-v1"] * 4, "sglang", "vllm"]  # those with the most features are more frequent


@dataclass(frozen=True)
class Case:
    """One scenario to run, as data of JSON."""

    name: str
    tree: dict[str, Any]  # of the scenario
    rows: Optional[list[Row]] = None  # the requests; None: the workload of the scenario
    is_table: bool = False  # whether they are stored as columns
    vidur: Optional[int] = None  # the cost model is one of small tables, with this step; None: that of the scenario

    @property
    def trace(self) -> Optional[Trace]:
        """The requests; None: the workload of the scenario."""
        if self.rows is None:
            return None
        requests = [client_request(row) for row in self.rows]
        return Trace(table_of(requests) if self.is_table else requests, "random", "synth")

    @property
    def profile(self) -> Optional[Profile]:
        """The profile of the run; None: that of the scenario."""
        return None if self.vidur is None else Profile("vidur", vidur_cost(self.vidur))


def cases() -> list[Case]:
    """Return all scenarios. They are the same in every process."""
    return [preset_case(name) for name in presets()] + [numbered_case(number) for number in numbers(COUNT)]


def numbers(count: int) -> list[int]:
    """Return the numbers of about `count` random scenarios: of fewer than 500, whole rounds over all policies."""
    step = max(1, 500 // count)
    return [number for number in range(max(500, count)) if number // len(ROUND) % step == step - 1]


def preset_case(name: str) -> Case:
    """Return the scenario of a preset, with the workload of the contest."""
    rng = random.Random(name)
    tree = {**preset(name), "workload": {"contest": {"X": 4, "T": 4}}, "seed": rng.randint(0, 99)}
    return Case(f"preset-{name}", {**tree, "profile": rng.choice(BUNDLED), "noise": rng.random() < 0.3})


def numbered_case(number: int) -> Case:
    """Return the random scenario with this number, which also chooses its policy."""
    return random_case(number, ROUND[number % len(ROUND)])


def random_case(number: int, policy: str) -> Case:
    """Return a random scenario of a policy: of one server, of ranks or of a cluster, or with several answers."""
    case, rng = server_case(number, policy), random.Random(f"more {number} {policy}")
    tree, kind = case.tree, rng.random()
    ranks = tree["engine"].get("data_parallel_size", 1)
    if kind < 0.37:
        tree["engine"].pop("sampling", None)  # the profile of a pool may not have its time
        if case.vidur is None and rng.random() < 0.3:
            tree["profile"] = rng.choice(WITH_MODEL)
        cluster = random_cluster(rng, lambda: random_server(rng, tree["policy"]), tree.get("profile") in WITH_MODEL)
        if ranks > 1:  # they are the replicas
            cluster = {key: cluster[key] for key in ("router", "staleness")}
        tree = valid_tree({**tree, "cluster": cluster})
    elif kind < 0.7 and case.rows is not None:
        add_answers(rng, case.rows, rules_of(make_policy(tree["policy"])).sequence_groups)
    return replace(case, tree=tree)


def valid_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a scenario without the keys that the product refuses in it."""
    while True:
        try:
            scenario_from(tree)
            return tree
        except BadInput as bad:
            *path, key = str(bad).split(": ")[1].split(".")
            section = tree
            for name in path:
                section = section[name]
            if key == "pools" and any(OWN & pool.keys() for pool in section[key]):
                section[key] = [{name: pool[name] for name in pool.keys() - OWN} for pool in section[key]]
            else:
                del section[key]


def random_server(rng: random.Random, policy: dict[str, Any]) -> dict[str, Any]:
    """Return what a pool has of its own: KV blocks, fields of the policy or another policy, a profile."""
    names = known_fields(POLICIES[policy["name"]])
    fields = {
        name: rng.choice(VALUES[name]) for name in rng.sample(names, min(2, len(names))) if name not in SPECULATIVE
    }
    own = {
        "engine": {"num_blocks": rng.choice([24, 64, 200, 1000])},
        "policy": rng.choice([fields, {"name": rng.choice(list(POLICIES))}]),
        "profile": rng.choice(WITH_MODEL),
    }
    return {name: value for name, value in own.items() if value and rng.random() < 0.6}


def server_case(number: int, policy: str) -> Case:
    """Return a random scenario of one server, or of ranks in lock step, often with few KV blocks."""
    rng = random.Random(f"{number} {policy}")
    kind = POLICIES[policy]
    often = [name for name in OFTEN if name in known_fields(kind) and rng.random() < 0.3]
    fields = accepted(kind, {**random_fields(rng, kind), **{name: rng.choice(VALUES[name]) for name in often}})
    drafts = random_drafts(random.Random(f"drafts {number}"), fields) if policy == "vllm-v1" else {}
    tree: dict[str, Any] = {
        **drafts,
        "policy": {"name": policy, **{name: value for name, value in fields.items() if name not in SPECULATIVE}},
        "engine": random_engine(rng),
        "seed": rng.randint(0, 99),
        "slo": rng.choice([{}, {"ttft": 100}, {"ttft": 500, "tpot": 20, "e2el": 3000}]),
    }
    rules = rules_of(make_policy(tree["policy"]))
    if rules.steps_in_flight == 1:
        tree["engine"]["data_parallel_size"] = rng.choice([1, 1, 1, 1, 1, 1, 2, 3])
    method = drafts.get("speculative", {}).get("method")
    if policy == "vllm-v1" and fields.get("pipeline_parallel_size", 1) == 1 and method != "mtp":
        groups = random.Random(f"groups {number}").choice([None, None, [None, 32], [48, None, None], [8], [None, 5]])
        tree["engine"].update({} if groups is None else {"kv_cache_groups": groups})
    if rules.may_have_host_cache and "kv_cache_groups" not in tree["engine"] and rng.random() < 0.4:
        host = {"blocks": rng.choice([4, 20, 200]), "bandwidth": rng.choice(["1GB", "50GB"]), "latency": 0.001}
        tree["engine"].update(model="llama2-7b", host_cache=host)
    vidur = None
    cost = rng.choice(["linear", "linear", "one pass", "two parts", "bundled", "vidur"])
    if cost == "bundled":
        tree["profile"] = rng.choice(BUNDLED)
        tree["noise"] = rng.random() < 0.7
        if load_profile(tree["profile"]).sampling:
            tree["engine"]["sampling"] = rng.choice([None, *load_profile(tree["profile"]).sampling])
    elif cost == "vidur":
        vidur = rng.choice([1, 32])
    else:
        tree["profile"] = random_cost(rng, cost)
    return Case(f"{number}-{policy}", valid_tree(tree), random_requests(rng, bool(drafts)), rng.random() < 0.5, vidur)


def random_drafts(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a section `speculative` for half of the policies, and remove the fields that it does not allow."""
    if rng.random() < 0.5:
        return {}
    method = rng.choice(["ngram", "eagle", "mtp", "draft_model"])
    for name in ("version", *(["async_scheduling"] if method == "ngram" else [])):
        fields.pop(name, None)
    acceptance, proposals = rng.choice([0.0, 0.6, 1.0, [0.8, 0.5, 0.5], "column"]), 0.7 if method == "ngram" else 1
    tokens = rng.choice([1, 2, 3])
    return {"speculative": {"method": method, "tokens": tokens, "acceptance": acceptance, "proposals": proposals}}


def random_engine(rng: random.Random) -> dict[str, Any]:
    """Return the `engine` section of a scenario."""
    engine: dict[str, Any] = {
        "num_blocks": rng.choice([10, 16, 24, 40, 64, 200, 1000]),
        "block_size": rng.choice([1, 2, 4, 16, 16, 32]),
        "host_blocks": rng.choice([0, 0, 8, 40]),
        "max_model_len": rng.choice([None, None, 96, 400]),
        "max_generate_length": rng.choice([None, None, None, 50]),
        "prefill_buckets": rng.choice([[], [], [16, 64], [128]]),
        "decode_buckets": rng.choice([[], [], [4, 8], [32]]),
        "reject_oversized": rng.choice(["auto", "always", "always", "never"]),
        "client_timeout": rng.choice([None, None, None, None, 0.3, 2, 10]),
        "front_end": {"lag": rng.choice([1, 1, 2, 7]), "end_lag": rng.random() < 0.3},
    }
    engine["num_blocks"] += rng.choice([0, 50, 100, 200]) // engine["block_size"]  # or most requests are refused
    for key, values in (("seconds", [0, 0.01, 0.2]), ("per_request", [0, 0.004]), ("per_token", [0, 1e-4])):
        if rng.random() < 0.2:
            engine["front_end"][key] = rng.choice(values)
    if rng.random() < 0.15:
        engine |= {"empty_step": rng.choice([0.001, 0.02]), "client_delay": rng.choice([0, 0.01])}
    if rng.random() < 0.3:
        engine["cold_start"] = {"prefill": rng.choice([0, 0.5]), "decode": rng.choice([0, 1, 0.25])}
    return engine


def random_cost(rng: random.Random, kind: str) -> dict[str, Any]:
    """Return the cost mapping of a scenario. Whole numbers are allowed for seconds."""
    if kind == "linear":
        terms = {"base": 0.01, "prefill_token": 0.001, "decode_row": 0.002, "context": 1e-5, "swap_block": 5e-4}
        more = {"prefill": 0.003, "prefill_square": 1e-6, "prefill_cross": 2e-6, "decode_step": 1, "decode_live": 1e-4}
        return {**terms, **{name: value for name, value in more.items() if rng.random() < 0.4}}
    prefill: dict[str, Any] = {"tokens": [[1, 0.004], [32, 0.011], [128, 0.05]]}
    buckets = [1, 8, 32] if rng.random() < 0.5 else []
    decode = {"rows": [[1, 0.006], [8, 0.01, 1e-7], [32, 1, 1e-6]], "buckets": buckets}
    more = {"row": 0.001, "square": 1e-6, "cross": 1e-6, "cross_root": 1e-5, "paged_square": 1e-7}
    more |= {"padded_square": 1e-7, "buckets": [16, 48, 96]}
    prefill |= {name: value for name, value in more.items() if rng.random() < 0.4}
    decode |= {name: 1e-5 for name in ("live", "context", "context_root", "longest") if rng.random() < 0.4}
    mixed: dict[str, Any] = {"one_pass": False, "overlap": rng.random()}
    if kind == "one pass":
        mixed = {"step": 1e-3, "row": 1e-4, "context": 1e-6, "floor": rng.random() < 0.5}
    cost: dict[str, Any] = {"kind": "parts", "prefill": prefill, "decode": decode, "mixed": mixed}
    if rng.random() < 0.4:
        cost |= {"swap": {"step": 1, "block": 1e-4}, "host": {"step": 1e-3, "row": 1e-5, "prompt": 1e-4, "token": 1e-6}}
    return cost


def vidur_cost(step: int) -> VidurCost:
    """Return a cost model from small tables in milliseconds."""
    by_tokens = [0.1 + 0.01 * tokens for tokens in range(65)]
    decode = [[0.02 * rows + 0.01 * context for context in range(4)] for rows in range(9)]
    prefill = [[0.05 * context + 0.01 * tokens for tokens in range(65)] for context in range(3)]
    return VidurCost(by_tokens, by_tokens, decode, prefill, step)
