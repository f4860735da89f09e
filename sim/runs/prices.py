"""What a run costs: the price of the devices of its cluster, per million tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from servesim.config.scenario import Scenario
from servesim.costs.profile import Profile

from .pools import servers_of

MILLION = 1_000_000
SECONDS_PER_HOUR = 3600
COSTS = {  # metric -> tokens per second that it divides by
    "cost_per_million_tokens": "output_throughput",
    "cost_per_million_total_tokens": "total_token_throughput",
}
HOW_TO_PRICE = "expected cluster.price_per_hour, the price of one device, in the scenario"


def price_per_second(scenario: Scenario, profile: Profile, there: Sequence[float]) -> Optional[float]:
    """Return what all devices of a cluster cost per second on average; None if the price of one is not known.

    `there` has the part of the run in which each replica was there.
    """
    total, first, cluster = 0.0, 0, scenario.fleet
    if cluster is None:
        return None
    for pool, server in zip(cluster.all_pools, servers_of(scenario, profile)):
        price = cluster.price_per_hour if pool.price_per_hour is None else pool.price_per_hour
        if price is None:
            return None
        stages = int(server.scenario.policy.get("pipeline_parallel_size", 1))
        devices = int(server.profile.about.get("tensor_parallel") or 1) * stages
        total += sum(there[first : first + pool.size]) * devices * price / SECONDS_PER_HOUR
        first += pool.size
    return total


def costs_per_million(price: Optional[float], rates: Mapping[str, Any]) -> dict[str, float]:
    """Return the costs at a price per second, from the token throughputs of a run; empty without a price."""
    if price is None:
        return {}
    return {name: MILLION * price / rates[rate] for name, rate in COSTS.items() if rates.get(rate)}


def is_priced(tree: Mapping[str, Any]) -> bool:
    """Whether a scenario has the price of every device."""
    cluster: Any = tree.get("cluster") or {}
    pools = cluster.get("pools") or []
    return cluster.get("price_per_hour") is not None or bool(pools and all("price_per_hour" in pool for pool in pools))
