"""The servers of a scenario: one for each pool of its cluster, which may have a profile and a policy of its own."""

from __future__ import annotations

from typing import NamedTuple

from servesim.config.scenario import Scenario, scenario_of_pool
from servesim.costs.device_profile import Profile, load_profile


class PoolServer(NamedTuple):
    """What the replicas of a pool have in common."""

    name: str  # of the pool
    role: str  # what they compute: "both", "prefill" or "decode"
    replicas: int
    scenario: Scenario  # of one of them
    profile: Profile


def servers_of(scenario: Scenario, profile: Profile) -> list[PoolServer]:
    """Return the server of each pool; without a cluster, the only server.

    `profile` is that of the scenario, or a draw of it; the profiles of the pools are then the same draws.
    """
    if scenario.fleet is None:
        return [PoolServer("", "both", 1, scenario, profile)]
    servers = []
    for pool, own in zip(scenario.fleet.all_pools, scenarios_of(scenario)):
        of_pool = profile if pool.profile is None else load_profile(own.profile).with_draw(profile.drawn)
        servers.append(PoolServer(pool.name, pool.role, pool.size, own, of_pool))
    return servers


def scenarios_of(scenario: Scenario) -> list[Scenario]:
    """Return the scenario of one server of each pool; without a cluster, the scenario itself."""
    fleet = scenario.fleet
    return [scenario] if fleet is None else [scenario_of_pool(scenario, pool) for pool in fleet.all_pools]


def profiles_of(scenario: Scenario, profile: Profile) -> list[Profile]:
    """Return the different profiles of the servers."""
    found: list[PoolServer] = []
    for server in servers_of(scenario, profile):
        if server.scenario.profile not in [other.scenario.profile for other in found]:
            found.append(server)
    return [server.profile for server in found]


def profile_for(scenario: Scenario, profile: Profile, role: str) -> Profile:
    """Return the profile of the first server that computes prompts ("prefill") or generates tokens ("decode")."""
    return next(server.profile for server in servers_of(scenario, profile) if server.role in (role, "both"))
