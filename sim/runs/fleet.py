"""Simulate a cluster: build the replicas of its pools and what the router sees of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

from servesim.config.cluster import Cluster
from servesim.config.memory import kv_bytes, model_layers
from servesim.config.scenario import Scenario
from servesim.core import BadInput, Request
from servesim.costs.derived import ScaledCost
from servesim.costs.profile import Profile
from servesim.engine.fleet import Fleet
from servesim.engine.kv_move import TransferSettings
from servesim.engine.lock_step import LockStep, requests_by_rank
from servesim.engine.loop import Loop
from servesim.engine.presence import Presence
from servesim.engine.replica import Replica
from servesim.engine.router_view import RouterTexts
from servesim.engine.simulated import SimulatedClock
from servesim.engine.transfers import Transfers
from servesim.routers.simple import RoundRobin

from .build import build_scenario_loop, build_simulation
from .pools import PoolServer, servers_of

TextOf = Callable[[Request], str]  # the prompt of a request


def build_fleet(
    scenario: Scenario, cluster: Cluster, requests: Iterable[Request], observers: Sequence[Any], hold: bool,
    profile: Profile, text_of: Optional[TextOf] = None,
) -> tuple[Fleet, list[SimulatedClock]]:  # fmt: skip
    """Return the replicas of a scenario behind their router, and their clocks; `text_of`: texts of real prompts."""
    if scenario.engine.data_parallel_size > 1:
        return build_ranks(scenario, cluster, requests, observers, profile, text_of)
    clocks: list[SimulatedClock] = []
    pools = servers_of(scenario, profile)
    servers = [pool for pool in pools for _ in range(pool.replicas)]
    names, changes = cluster.names, cluster.changes()
    router = cluster.make_router() if cluster.size > 1 or changes is not None else RoundRobin()  # one has no choice

    def build(number: int) -> Loop:
        """Return a new loop of a replica."""
        server = servers[number]
        loop, clock = build_simulation(server.scenario, [], observers, hold, server.profile, number)
        loop.server.name = names[number] if names else ""
        clocks.append(clock)
        return loop

    replicas = [Replica(build(number)) for number in range(len(servers))]
    staleness = router.report_interval if cluster.staleness is None else cluster.staleness
    texts, seed = RouterTexts(text_of), scenario.seed
    transfers, decode = None, None
    if cluster.is_apart:
        transfers = build_transfers(pools, cluster, replicas)
        decode = cluster.make_decode_router(), cluster.decodes
    fleet = Fleet(replicas, router, requests, texts, seed, staleness, transfers, decode)
    if changes is not None:
        assert isinstance(requests, Sequence)  # see `needs_all`
        Presence(fleet, changes, build, ScaledCost, requests)
    return fleet, clocks


def build_ranks(
    scenario: Scenario, cluster: Cluster, requests: Iterable[Request], observers: Sequence[Any], profile: Profile,
    text_of: Optional[TextOf],
) -> tuple[LockStep, list[SimulatedClock]]:  # fmt: skip
    """Return ranks in lock step, and their one clock. Without a cluster, no router chooses the rank of a request."""
    router = RoundRobin() if scenario.cluster is None else cluster.make_router()
    by_rank: list[list[Request]] = [[] for _ in cluster.names]
    if scenario.cluster is None:
        by_rank, requests = requests_by_rank(requests, cluster.size), []
    loop, clock = build_simulation(scenario, by_rank[0], observers, False, profile)
    others = [build_scenario_loop(scenario, own, clock, observers, profile.front_end) for own in by_rank[1:]]
    staleness = router.report_interval if cluster.staleness is None else cluster.staleness
    replicas = [Replica(each) for each in (loop, *others)]
    fleet = LockStep(replicas, router, requests, RouterTexts(text_of), scenario.seed, staleness)
    fleet.routes = scenario.cluster is not None
    for number, (replica, own, name) in enumerate(zip(replicas, by_rank, cluster.names)):
        replica.server.name, replica.sent = name, len(own)
        fleet.replica_of.update(dict.fromkeys([request.id for request in own], number))
    return fleet, [clock]


def build_transfers(servers: Sequence[PoolServer], cluster: Cluster, replicas: Sequence[Replica]) -> Transfers:
    """Return the copies of KV between the pools of a cluster, as its settings and the engine of its decode pool say."""
    pools = [server.scenario for server in servers if server.role == "prefill"]
    keys, rules, decodes = cluster.transfer, replicas[cluster.decodes[0]].server.rules, cluster.decodes
    token_bytes = keys.token_bytes or max(kv_bytes(pool.engine.model, pool.profile) for pool in pools)
    loads_first = rules.loads_first or keys.layerwise
    if loads_first and keys.choose == "prefill_first":
        raise BadInput("cluster.transfer.choose: expected decode_first: the decode replica allocates blocks first")
    settings = TransferSettings(
        keys.latency, keys.bandwidth, token_bytes, keys.link,
        model_layers(pools[0].engine.model, pools[0].profile) if keys.layerwise else 0,
        loads_first or keys.choose == "decode_first", loads_first, keys.min_uncached_tokens, keys.timeout,
        keys.on_timeout == "recompute",
    )  # fmt: skip
    transfers = Transfers(settings)
    for number, replica in enumerate(replicas):
        loop = replica.loop
        loop.arrivals.port = transfers.make_port(number, loop.server, loop.inbox, loop.wake, number not in decodes)
    return transfers
