"""The order of routers in published cases: prefixes that routers should follow, and one that all requests share."""

from __future__ import annotations

from typing import Any

from servesim.config.scenario import scenario_from
from servesim.runs.simulate import simulate

SERVER: dict[str, Any] = {
    "profile": {"base": 0.005, "prefill_token": 0.0001, "decode_row": 0.0002, "context": 1e-8},
    "policy": "vllm-v1", "engine": {"num_blocks": 2000, "block_size": 16},
}  # fmt: skip


def ttft(router: Any, workload: dict[str, Any], replicas: int) -> float:
    run = simulate(scenario_from({**SERVER, "workload": workload, "cluster": {"replicas": replicas, "router": router}}))
    return float(run.result()["mean_ttft_ms"])


def test_prefix_aware_routers_win_against_round_robin() -> None:
    """60 prefixes of 2,000 tokens: a replica has memory for 16 of them, four replicas for all."""
    workload = {
        "requests": 400, "arrivals": {"kind": "poisson", "rate": 12}, "lengths": {"prompt": 200, "output": 40},
        "prefixes": {"count": 60, "tokens": 2000},
    }  # fmt: skip
    aware = ("sglang-cache-aware", "llm-d", "llm-d-precise", "dynamo-kv", "production-stack-kvaware")
    times = {router: ttft(router, workload, 4) for router in ("round-robin", *aware)}
    assert all(times[router] < 0.9 * times["round-robin"] for router in aware), times


def test_round_robin_wins_if_all_requests_share_a_prefix() -> None:
    """A quarter of each prompt is the same. If that is above the threshold, one of two workers gets all requests."""
    workload = {
        "requests": 150, "arrivals": {"kind": "poisson", "rate": 1.9}, "lengths": {"prompt": 7252, "output": 40},
        "prefixes": {"count": 1, "tokens": 2548},
    }  # fmt: skip
    times = [
        ttft({"name": "sglang-cache-aware", "cache_threshold": threshold}, workload, 2) for threshold in (0.25, 0.3)
    ]
    round_robin = ttft("round-robin", workload, 2)
    assert times[0] > 2 * round_robin
    assert times[1] < 1.2 * round_robin  # below the threshold the loads decide
