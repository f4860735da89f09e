"""Random sections `cluster`: all routers, pools that differ, faults, autoscaling, prefill and decode apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from servesim.routers import ROUTERS

from .policy_values import known_fields

ROUTER_VALUES: dict[str, list[Any]] = {
    "cache_threshold": [0.0, 0.3, 0.8], "balance_abs_threshold": [0, 2, 64], "balance_rel_threshold": [1.0, 1.5],
    "eviction_interval_secs": [0.5, 120.0], "max_tree_size": [200, 2**26], "threshold": [1.2, 2.0],
    "assignment_mode": ["random", "min_load", "min_group"], "prefix_token_count": [8, 256],
    "prefix_min_match_length": [0, 40], "kv_aware_threshold": [0, 20, 2000], "request_stats_window": [0.5, 60.0],
    "block_size": [1, 4, 16], "block_size_tokens": [4, 16], "max_prefix_blocks": [2, 256],
    "lru_blocks_per_replica": [5, 31250], "load": [0.0, 1.0], "prefix": [0.0, 3.0], "router_temperature": [0.0, 0.5],
    "router_ttl_secs": [0.5, 120.0], "use_kv_events": [False, True], "overlap_score_credit": [0.0, 1.0],
    "overlap_score_credit_decay": [0.0, 0.5], "prefill_load_scale": [0.0, 1.0], "imbalance": [1, 8],
    "decode_active_request_weight": [0.0, 1.0], "deviations": [0.0, 1.0],
}  # fmt: skip
Section = dict[str, Any]


def random_cluster(rng: random.Random, random_server: Callable[[], Section], knows_model: bool) -> Section:
    """Return a cluster of two to four replicas; `random_server` returns what a pool may have of its own."""
    kind = rng.choice(["equal", "equal", "equal", "pools", "pools", "apart", "apart", "apart", "scaled"])
    cluster: Section = {"router": random_router(rng), "staleness": rng.choice([None, None, 0, 0.05, 1])}
    replicas = rng.randint(2, 4)
    if kind == "equal":
        cluster["replicas"] = replicas
    elif kind == "scaled":
        cluster["autoscale"] = random_autoscale(rng, replicas)
    else:
        names = ["prefill", "decode"] if kind == "apart" else ["large", "small"]
        sizes = [first := rng.randint(1, replicas - 1), replicas - first]
        cluster["pools"] = [{"name": name, **random_pool(rng, size)} for name, size in zip(names, sizes)]
        for pool in cluster["pools"] if kind == "pools" or rng.random() < 0.3 else ():
            pool.update(random_server() if rng.random() < 0.7 else {})
    if kind == "apart":
        for pool in cluster["pools"]:
            pool["role"] = pool["name"]
        cluster |= {"transfer": random_transfer(rng, knows_model), "decode_router": random_router(rng)}
    if rng.random() < 0.35:
        faults = [random_fault(rng, replicas) for _ in range(rng.randint(1, 3))]
        cluster |= {"faults": faults, "retry": rng.random() < 0.7}
    return {**cluster, "detect": rng.choice([0, 0, 0.3])}


def random_router(rng: random.Random) -> Section:
    """Return a router with some of its fields."""
    name = rng.choice(list(ROUTERS))
    fields = [field for field in known_fields(ROUTERS[name]) if field in ROUTER_VALUES and rng.random() < 0.4]
    return {"name": name, **{field: rng.choice(ROUTER_VALUES[field]) for field in fields}}


def random_pool(rng: random.Random, replicas: int) -> Section:
    return {"autoscale": random_autoscale(rng, replicas)} if rng.random() < 0.15 else {"replicas": replicas}


def random_autoscale(rng: random.Random, most: int) -> Section:
    """Return a rule that adds and removes replicas."""
    rule = {"min": rng.randint(1, most), "max": most, "target_queue": rng.choice([0.5, 1, 4])}
    return {**rule, "interval": rng.choice([0.1, 0.5, 0.7]), "start_up": rng.choice([0, 0.3, 1])}


def random_fault(rng: random.Random, replicas: int) -> Section:
    """Return what happens to a replica while most requests are served."""
    fault = {"at": rng.choice([0, 0.1, 0.5, 1, 2, 5, rng.uniform(0, 6)]), "replica": rng.randrange(replicas)}
    recover = rng.choice([None, 0, 0.5, 2])
    return {**fault, "kind": rng.choice(["crash", "crash", "restart", "slow"]), "recover": recover, "factor": 3.0}


def random_transfer(rng: random.Random, knows_model: bool) -> Section:
    """Return how KV is copied; only a profile that names its model has layers."""
    return {
        "token_bytes": 1,
        "latency": rng.choice([0, 0.00038, 0.05, 0.5]),
        "bandwidth": rng.choice([500, 20_000, 10**12]),
        "link": rng.choice(["none", "shared", "per_pair"]),
        "layerwise": knows_model and rng.random() < 0.3,
        "choose": rng.choice([None, None, "decode_first"]),
        "min_uncached_tokens": rng.choice([None, None, 0, 20]),
        "timeout": rng.choice([None, None, 0.2, 1]),
        "on_timeout": rng.choice(["fail", "recompute"]),
    }
