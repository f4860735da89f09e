"""500 random scenarios over all policies, and one per preset: costs, requests, limits and front ends of all kinds.

With them what must hold for every run. `make test` compares 100 of them, plain and compiled, with and without
fast-forward, and `make test-all` all. For 2,000:

    SCENARIOS=2000 python -m pytest tests/compiled/test_same_results.py
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

from servesim.config.registry import SPECULATIVE, make_policy, preset, presets
from servesim.core import ClientRequest
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.imported_tables import VidurCost
from servesim.engine.rules import rules_of
from servesim.policies import POLICIES
from servesim.runs.request_rows import seconds_in_states
from servesim.runs.run_requests import RunRequests
from servesim.runs.simulate import Run
from servesim.testing import TIMES
from servesim.traces.trace import Trace, table_of

from .policy_values import random_fields

COUNT = int(os.environ.get("SCENARIOS", "500"))
BUNDLED = ("h200-llama2-7b", "cpu-tiny-kbk", "ascend910b4-llama2-7b")


@dataclass(frozen=True)
class Case:
    """One scenario to run."""

    name: str
    tree: dict[str, Any]  # of the scenario
    trace: Optional[Trace] = None  # None: the workload of the scenario
    profile: Optional[Profile] = None  # None: the profile of the scenario


def cases() -> list[Case]:
    """Return all scenarios. They are the same in every process."""
    names = list(POLICIES)
    chosen = [random_case(number, names[number % len(names)]) for number in numbers(COUNT)]
    return [preset_case(name) for name in presets()] + chosen


def numbers(count: int) -> list[int]:
    """Return the numbers of about `count` random scenarios: of fewer than 500, whole rounds over all policies."""
    step = max(1, 500 // count)
    return [number for number in range(max(500, count)) if number // len(POLICIES) % step == step - 1]


def preset_case(name: str) -> Case:
    """Return the scenario of a preset, with the workload of the contest."""
    rng = random.Random(name)
    tree = {**preset(name), "workload": {"contest": {"X": 4, "T": 4}}, "seed": rng.randint(0, 99)}
    return Case(f"preset-{name}", {**tree, "profile": rng.choice(BUNDLED), "noise": rng.random() < 0.3})


def random_case(number: int, policy: str) -> Case:
    """Return a random scenario of a policy, often with few KV blocks."""
    rng = random.Random(f"{number} {policy}")
    fields = random_fields(rng, POLICIES[policy])
    drafts = random_drafts(random.Random(f"drafts {number}"), fields) if policy == "vllm-v1" else {}
    tree: dict[str, Any] = {
        **drafts,
        "policy": {"name": policy, **{name: value for name, value in fields.items() if name not in SPECULATIVE}},
        "engine": random_engine(rng),
        "seed": rng.randint(0, 99),
        "slo": rng.choice([{}, {"ttft": 100}, {"ttft": 500, "tpot": 20, "e2el": 3000}]),
    }
    if rules_of(make_policy(tree["policy"])).steps_in_flight == 1:
        tree["engine"]["data_parallel_size"] = rng.choice([1, 1, 1, 2, 3])
    method = drafts.get("speculative", {}).get("method")
    if policy == "vllm-v1" and fields.get("pipeline_parallel_size", 1) == 1 and method != "mtp":
        groups = random.Random(f"groups {number}").choice([None, None, [None, 32], [48, None, None], [8], [None, 5]])
        tree["engine"].update({} if groups is None else {"kv_cache_groups": groups})
    profile = None
    kind = rng.choice(["linear", "linear", "one pass", "two parts", "bundled", "vidur"])
    if kind == "bundled":
        tree["profile"] = rng.choice(BUNDLED)
        tree["noise"] = rng.random() < 0.7
        if load_profile(tree["profile"]).sampling:
            tree["engine"]["sampling"] = rng.choice([None, *load_profile(tree["profile"]).sampling])
    elif kind == "vidur":
        profile = Profile("vidur", random_vidur_cost(rng))
    else:
        tree["profile"] = random_cost(rng, kind)
    requests = random_requests(rng)
    trace = Trace(table_of(requests) if rng.random() < 0.5 else requests, "random", "synth")
    return Case(f"{number}-{policy}", tree, trace, profile)


def random_drafts(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a section `speculative` for half of the policies, and remove the fields that it does not allow."""
    if rng.random() < 0.5:
        return {}
    method = rng.choice(["ngram", "eagle", "mtp", "draft_model"])
    for name in ("version", *(["async_scheduling"] if method == "ngram" else [])):
        fields.pop(name, None)
    acceptance, proposals = rng.choice([0.0, 0.6, 1.0, [0.8, 0.5, 0.5]]), 0.7 if method == "ngram" else 1
    tokens = rng.choice([1, 2, 3])
    return {"speculative": {"method": method, "tokens": tokens, "acceptance": acceptance, "proposals": proposals}}


def random_engine(rng: random.Random) -> dict[str, Any]:
    """Return the `engine` section of a scenario."""
    engine = {
        "num_blocks": rng.choice([10, 16, 24, 40, 64, 200, 1000]),
        "block_size": rng.choice([1, 2, 4, 16, 16, 32]),
        "host_blocks": rng.choice([0, 0, 8, 40]),
        "max_model_len": rng.choice([None, 64, 96, 400]),
        "max_generate_length": rng.choice([None, None, None, 50]),
        "prefill_buckets": rng.choice([[], [], [16, 64], [128]]),
        "decode_buckets": rng.choice([[], [], [4, 8], [32]]),
        "reject_oversized": rng.choice(["auto", "always", "always", "never"]),
        "client_timeout": rng.choice([None, None, 0.3, 2]),
        "front_end": {"lag": rng.choice([1, 1, 2, 7]), "end_lag": rng.random() < 0.3},
    }
    if rng.random() < 0.3:
        engine["front_end"]["seconds"] = rng.choice([0, 0.01, 0.2])
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


def random_vidur_cost(rng: random.Random) -> VidurCost:
    """Return a cost model from small tables in milliseconds."""
    by_tokens = [0.1 + 0.01 * tokens for tokens in range(65)]
    decode = [[0.02 * rows + 0.01 * context for context in range(4)] for rows in range(9)]
    prefill = [[0.05 * context + 0.01 * tokens for tokens in range(65)] for context in range(3)]
    return VidurCost(by_tokens, by_tokens, decode, prefill, rng.choice([1, 32]))


def random_requests(rng: random.Random) -> list[ClientRequest]:
    """Return random requests: simultaneous arrivals, whole seconds, sessions, failures, limits above the output."""
    longest = rng.choice([12, 40, 40, 300])
    with_sessions, with_failures = rng.random() < 0.3, rng.random() < 0.2
    requests: list[ClientRequest] = []
    now: float = 0
    for number in range(rng.randint(1, 30)):
        now += rng.choice([0, 0, 0, 0.012, 0.1, 0.5, 1])
        output = rng.randint(1, longest)
        name = number if rng.random() < 0.6 else f"r{number}#job_name[{rng.choice('abc')}]#"  # a job of vllm-ascend
        request = ClientRequest(
            name, now, rng.randint(1, 60), output,
            rng.choice([None, output, output + 5, max(1, output - 3)]), priority=rng.randint(0, 2),
        )  # fmt: skip
        if with_sessions and requests and rng.random() < 0.5:
            request.follows, request.session = rng.choice(requests).id, "chat"
            request.think_time = rng.choice([0.0, 0.25, 1.0])
        if with_failures and rng.random() < 0.3:
            request.fails_at_token = rng.randint(1, output)
        requests.append(request)
    return requests


def metrics_of(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a result.json with its value."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from metrics_of(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def different_keys(run: Run, other: Run) -> list[str]:
    """Return what differs between two runs: times exactly, keys of result.json to the last digits of a sum."""
    metrics, others = dict(metrics_of(run.result())), dict(metrics_of(other.result()))
    keys = [key for key in {**metrics, **others} if not is_same(metrics.get(key), others.get(key))]
    if [TIMES(request) for request in run.requests] != [TIMES(request) for request in other.requests]:
        keys.append("times of requests")
    return keys if str(run.stuck) == str(other.stuck) else [*keys, "stuck"]


def is_same(value: Any, other: Any) -> bool:
    """Whether two metrics are equal; floats are sums in another order."""
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(value) and math.isnan(other))
    return bool(value == other)


def wrong_states(run: Run) -> list[str]:
    """Return the requests whose seconds in their states do not add up to the time until their end."""
    wrong = []
    states = zip(*(seconds.tolist() for seconds in seconds_in_states(RunRequests.of(run.requests))))
    for request, seconds in zip(run.requests, states):
        if request.client_end is not None and request.finish is not None:
            lifetime = max(request.client_end, request.finish) - request.sent
            if min(seconds) < 0.0 or not math.isclose(sum(seconds), lifetime, rel_tol=1e-9, abs_tol=1e-9):
                wrong.append(f"request {request.id}: {lifetime} s, states {seconds}")
    return wrong
