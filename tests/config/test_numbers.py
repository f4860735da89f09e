"""Every number of a scenario, workload, policy, cost model and sweep: absurd values give a result or one line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any, Union

import pytest
from servesim.config.scenario import EngineConfig, Scenario, scenario_from
from servesim.core import BadInput
from servesim.core.fields import policy_fields
from servesim.policies import POLICIES
from servesim.runs.simulate import simulate
from servesim.study.study_keys import SearchFile, SweepFile
from servesim.study.sweep_file import build_experiment, validate_file

Tree = dict[str, Any]
Path = tuple[Union[str, int], ...]
NAN, INF = float("nan"), float("inf")
VALUES = [
    0, -1, 1.5, 1e30, 1e308, -1e308, 1e-320, 1e-9, 1e9, 1e12, 2**31 - 1, 10**18, NAN, INF, -INF, 10**400, -(10**400),
    True, "x", [], {}, None,
]  # fmt: skip
LENGTHS = {"prompt": 20, "output": 4}
FIXED_ARRIVALS = {"kind": "constant", "rate": 5.0}
ENGINE = {
    "num_blocks": 64, "block_size": 4, "host_blocks": 8, "max_model_len": 256, "max_generate_length": 64,
    "data_parallel_size": 1,
    "prefill_buckets": [16, 32], "decode_buckets": [2, 4], "front_end": {"lag": 2, "seconds": 0.1, "per_request": 0.01,
    "per_token": 1e-6},
    "client_timeout": 5.0, "client_delay": 0.001, "empty_step": 0.001, "cold_start": {"prefill": 0.1, "decode": 0.1},
}  # fmt: skip
ARRIVALS: list[Tree] = [
    {"kind": "constant", "rate": 5.0},
    {"kind": "poisson", "rate": 5.0},
    {"kind": "gamma", "rate": 5.0, "burstiness": 0.5},
    {"kind": "gamma", "rate": 5.0, "cv": 2.0},
    {"kind": "vllm", "rate": 5.0, "burstiness": 0.5},
    {"kind": "contest", "X": 5.0, "send_overhead": 0.01},
    {"kind": "on-off", "on_rate": 5.0, "off_rate": 1.0, "on_seconds": 1.0, "off_seconds": 1.0},
    {"kind": "mmpp", "rates": [5.0, 1.0], "seconds": [1.0, 1.0]},
    {"kind": "diurnal", "rate": 5.0, "amplitude": 0.5, "period": 10.0, "peak": 1.0},
    {"kind": "closed", "users": 2, "think_time": 0.1, "ramp": 0.1},
]
DISTRIBUTIONS: list[Tree] = [
    {"kind": "fixed", "tokens": 20, "min": 1, "max": 30},
    {"kind": "uniform", "low": 10, "high": 20, "min": 1, "max": 30},
    {"kind": "lognormal", "mean": 20.0, "sd": 10.0, "max": 60},
    {"kind": "lognormal", "median": 20.0, "sigma": 0.5, "max": 60},
    {"kind": "quantiles", "at": [0, 1], "tokens": [5, 20]},
]
WORKLOADS: list[Tree] = [
    *({"requests": 3, "arrivals": arrivals, "lengths": LENGTHS} for arrivals in ARRIVALS),
    *(
        {"duration": 0.6, "arrivals": arrivals, "lengths": LENGTHS}
        for arrivals in ARRIVALS
        if arrivals["kind"] != "closed"
    ),
    *({"requests": 3, "arrivals": FIXED_ARRIVALS, "lengths": {"prompt": d, "output": 4}} for d in DISTRIBUTIONS),
    {"requests": 3, "arrivals": FIXED_ARRIVALS, "lengths": {**LENGTHS, "correlation": 0.5}, "limit": 4},
    {"requests": 3, "arrivals": FIXED_ARRIVALS, "lengths": LENGTHS, "priorities": {"0": 0.5, "1": 0.5}},
    {"stages": [{"rate": 5.0, "seconds": 2.0}, {"rate": 9.0, "seconds": 1.0}], "lengths": LENGTHS},
    {"concurrency": 2, "requests": 3, "lengths": LENGTHS},
    {"contest": {"X": 5.0, "T": 0.6, "send_overhead": 0.01}},
    {"requests": 3, "arrivals": FIXED_ARRIVALS, "lengths": LENGTHS,
     "prefixes": {"count": 2, "tokens": DISTRIBUTIONS[2]}},
    {
        "requests": 6, "arrivals": FIXED_ARRIVALS, "lengths": LENGTHS,
        "prefixes": {"count": 3, "tokens": 8, "zipf": 1.1, "share": 0.7}, "sessions": {"turns": 2, "think_time": 0.5},
    },
    {
        "duration": 0.6, "arrivals": FIXED_ARRIVALS, "lengths": LENGTHS,
        "sessions": {"turns": [1, 3], "think_time": 0.5, "pauses": "exponential"},
    },
]  # fmt: skip
LINEAR = {
    "base": 0.01, "prefill": 0.01, "prefill_row": 0.01, "prefill_token": 1e-4, "prefill_square": 1e-6,
    "prefill_cross": 1e-6, "decode_step": 0.01, "decode_row": 1e-3, "decode_live": 1e-3, "context": 1e-6,
    "swap_block": 1e-3,
}  # fmt: skip
PARTS = {
    "kind": "parts",
    "prefill": {
        "tokens": [[1, 0.01], [64, 0.05]], "buckets": [16, 64], "row": 1e-6, "square": 1e-6, "cross": 1e-6,
        "cross_root": 1e-6, "paged_square": 1e-6, "padded_square": 1e-6,
    },
    "decode": {"rows": [[1, 0.01, 1e-6], [8, 0.02, 1e-6]], "live": 1e-4, "context": 1e-6, "context_root": 1e-6},
    "swap": {"step": 1e-6, "block": 1e-6},
    "host": {"step": 1e-6, "row": 1e-6, "prompt": 1e-6, "token": 1e-6},
}  # fmt: skip
PROFILES: list[Tree] = [
    LINEAR,
    {**PARTS, "mixed": {"step": 1e-6, "row": 1e-6, "context": 1e-6}},
    {**PARTS, "mixed": {"one_pass": False, "overlap": 0.5}},
]
BASE: Tree = {
    "workload": WORKLOADS[0],
    "policy": {"name": "vllm"},
    "engine": {"num_blocks": 64},
    "profile": LINEAR,
    "seed": 1,
}
MODEL = {
    "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "intermediate": 128, "vocab": 100,
    "weights": 10**6,
}  # fmt: skip
MEMORY = {"device_memory": 10**8, "gpu_memory_utilization": 0.9, "reserve": 10**6, "model": MODEL}
SCENARIOS: list[Tree] = [
    *({**BASE, "workload": workload} for workload in WORKLOADS),
    *({**BASE, "profile": profile} for profile in PROFILES),
    {**BASE, "engine": ENGINE, "slo": {"ttft": 100.0, "tpot": 50.0, "e2el": 1000.0}},
    {**BASE, "engine": MEMORY},
    {
        **BASE, "policy": {"name": "vllm-v1"},
        "engine": {**MEMORY, "host_cache": {"blocks": 8, "bandwidth": 1e9, "latency": 0.001}},
    },
    {**BASE, "policy": {"name": "vllm-v1"}, "engine": {"num_blocks": 64, "kv_cache_groups": [32, None]}},
    {
        **BASE, "policy": {"name": "vllm-v1"},
        "speculative": {"method": "ngram", "tokens": 2, "acceptance": 0.5, "proposals": 0.5, "drafting": 0.001},
    },
    {
        **BASE, "policy": {"name": "vllm-v1"},
        "speculative": {"method": "mtp", "modules": 2, "tokens": 2, "acceptance": [0.5, 0.25]},
    },
    {**BASE, "cluster": {"replicas": 2, "staleness": 0.1, "router": {"name": "vllm-dp"}, "price_per_hour": 2.0}},
    {
        **BASE,
        "cluster": {
            "replicas": 2, "detect": 0.1,
            "faults": [{"at": 0.1, "replica": 1, "kind": "slow", "factor": 2.0, "recover": 0.5}],
        },
    },
    {
        **BASE,
        "cluster": {"autoscale": {"min": 1, "max": 2, "target_queue": 1.0, "interval": 0.5, "start_up": 0.1}},
    },
    {
        **BASE,
        "cluster": {
            "pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
            "transfer": {
                "latency": 0.001, "bandwidth": 1e9, "token_bytes": 1000, "min_uncached_tokens": 4, "timeout": 1.0,
            },
        },
    },
    {**BASE, "cluster": {"pools": [{"name": "a", "replicas": 1}, {"name": "b", "policy": {"max_num_seqs": 2}}]}},
]  # fmt: skip


def numeric_paths(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every number in a tree."""
    if type(tree) in (int, float):
        yield path
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from numeric_paths(value, (*path, key))


def replaced(tree: Tree, path: Path, value: Any) -> Tree:
    """Return a copy of a tree with one value replaced."""
    result = copy.deepcopy(tree)
    inner: Any = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def check_line(error: BadInput) -> None:
    """Assert that a message is one short line in the form `KEY: expected TEXT, got VALUE`."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500
    assert "expected expected" not in text
    assert "Unable to" not in text
    assert text.count(", got ") <= 1, text


def check(tree: Tree) -> None:
    """Run a scenario; it must end with finite times, or with an error of one line."""
    try:
        run = simulate(scenario_from(tree))
    except BadInput as error:
        check_line(error)
        return
    assert 0 <= run.end < INF
    for request in run.requests:
        for time in (request.first_token, request.finish):
            assert time is None or request.sent <= time < INF


def cases() -> list[Any]:
    """Return every scenario and path once; the shared parts of the scenarios only in the first one."""
    seen: set[str] = set()
    result = []
    for tree in SCENARIOS:
        for path in numeric_paths(tree):
            section = tree[str(path[0])]
            name = f"{path}{section}"
            if name not in seen:
                seen.add(name)
                result.append(pytest.param(tree, path, id=".".join(map(str, path)) + f"-{len(result)}"))
    return result


@pytest.mark.parametrize(("tree", "path"), cases())
def test_any_number_of_a_scenario_gives_a_result_or_one_line(tree: Tree, path: Path) -> None:
    check(tree)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow inside numpy is a missing limit
        for value in VALUES:
            check(replaced(tree, path, value))


@pytest.mark.parametrize("name", POLICIES)
def test_any_number_of_a_policy_gives_a_result_or_one_line(name: str) -> None:
    for key, field in policy_fields(POLICIES[name]).items():
        if {int, float} & set(field.types):
            for value in VALUES:
                check({**BASE, "policy": {"name": name, key: value}})


def numeric_keys(schema: Tree) -> set[str]:
    """Return `MODEL.KEY` of every number in a JSON schema."""

    def is_numeric(node: Any) -> bool:
        if isinstance(node, list):
            return any(map(is_numeric, node))
        if not isinstance(node, dict):
            return False
        inner = (node.get(key) for key in ("anyOf", "items", "prefixItems", "additionalProperties"))
        return node.get("type") in ("integer", "number") or any(map(is_numeric, inner))

    models = {schema["title"]: schema, **schema.get("$defs", {})}
    return {
        f"{model}.{key}"
        for model, node in models.items()
        for key, value in node.get("properties", {}).items()
        if is_numeric(value)
    }


def test_the_scenarios_above_have_every_number_of_the_schema() -> None:
    keys = {str(part) for tree in SCENARIOS for path in numeric_paths(tree) for part in path}
    missing = {name for name in numeric_keys(Scenario.model_json_schema()) if name.split(".")[1] not in keys}
    assert missing == {"TraceFile.repeat", "TraceFile.window"}  # need a file
    assert numeric_keys(EngineConfig.model_json_schema()) >= {"EngineConfig.num_blocks", "FrontEnd.lag"}


SWEEP = {"base": BASE, "params": {"policy.max_num_seqs": [1, 2]}, "objectives": ["makespan"]}
GRIDS: list[Tree] = [
    {"range": [1, 4], "step": 1},
    {"range": [1, 4], "count": 2},
    {"range": [1, 4], "count": 2, "scale": "log"},
]


@pytest.mark.parametrize("spec", GRIDS, ids=str)
def test_any_number_of_a_range_gives_a_grid_or_one_line(spec: Tree) -> None:
    from servesim.study.grid import unroll

    for path in numeric_paths(spec):
        for value in VALUES:
            try:
                unroll({"engine.num_blocks": replaced(spec, path, value)})
            except BadInput as error:
                check_line(error)


@pytest.mark.parametrize("model", [SweepFile, SearchFile])
def test_any_number_of_a_sweep_or_search_file_gives_a_plan_or_one_line(model: type[Any]) -> None:
    for name in numeric_keys(model.model_json_schema()):
        owner, key = name.split(".")
        for value in VALUES:
            tree = {**SWEEP, **({key: value} if owner == model.__name__ else {owner.lower(): {key: value}})}
            try:
                file = validate_file(model, tree, "file.yaml", {})
                if isinstance(file, SweepFile):
                    build_experiment(file, BASE, "name")
            except BadInput as error:
                check_line(error)


def test_a_trace_with_a_prompt_of_a_billion_tokens_gives_one_line(tmp_path: Any) -> None:
    (tmp_path / "trace.csv").write_text("arrival,prompt,output\n0,5,5\n1,1000000000,5\n")
    scenario = scenario_from({**BASE, "workload": None, "trace": str(tmp_path / "trace.csv")})
    with pytest.raises(BadInput, match="row 3: prompt: expected at most 10000000 tokens, got 1000000000"):
        simulate(scenario)
