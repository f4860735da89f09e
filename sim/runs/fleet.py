"""Simulate a cluster: build the replicas of its pools and what the router sees of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servesim.config.cluster import Cluster
from servesim.config.scenario import Scenario, scenario_of_pool
from servesim.core import Request
from servesim.costs.device_profile import Profile, load_profile
from servesim.engine.faults import ChangingFleet
from servesim.engine.fleet import Fleet
from servesim.engine.loop import Loop
from servesim.engine.replica import Replica
from servesim.engine.simulated import SimulatedClock
from servesim.routers.router import CHARACTERS_PER_TOKEN, Asked, Router

from .build import build_simulation

HTTP_BODY = 300  # bytes of a request beside its prompt: model, limits, headers of the message


class RouterTexts:
    """The text of requests as a router sees it. Equal pieces of prompts have equal characters."""

    def __init__(self, router: Router) -> None:
        self._reads_text = router.reads_text
        self._numbers: dict[Any, int] = {}  # name of a text -> its number

    def __call__(self, request: Request) -> Asked:
        size = CHARACTERS_PER_TOKEN * request.prompt
        text = self.text(request) if self._reads_text else ""
        return Asked(request.id, text, request.prompt, request.session, size + HTTP_BODY)

    def text(self, request: Request) -> str:
        """Return the characters of a prompt."""
        pieces = [(("own", request.id), request.prompt)] if request.content is None else request.content.pieces
        return "".join([self._characters(name, CHARACTERS_PER_TOKEN * tokens) for name, tokens in pieces])

    def _characters(self, name: Any, count: int) -> str:
        word = f"{self._numbers.setdefault(name, len(self._numbers))}."
        return (word * (count // len(word) + 1))[:count]


def build_fleet(
    scenario: Scenario, cluster: Cluster, requests: Sequence[Request], observers: Sequence[Any], fast_forward: bool,
    profile: Profile,
) -> tuple[Fleet, list[SimulatedClock]]:  # fmt: skip
    """Return the replicas of a scenario behind their router, and their clocks."""
    clocks: list[SimulatedClock] = []
    servers: list[tuple[Scenario, Profile]] = []
    for pool in cluster.all_pools:
        server = scenario_of_pool(scenario, pool)
        of_pool = profile if pool.profile is None else load_profile(server.profile)
        for _ in range(pool.replicas):
            own = server.model_copy(update={"seed": scenario.seed + len(servers)})  # each has noise of its own
            servers.append((own, of_pool))

    def build(number: int) -> Loop:
        """Return a new loop of a replica."""
        loop, clock = build_simulation(servers[number][0], [], observers, fast_forward, servers[number][1])
        clocks.append(clock)
        return loop

    replicas = [Replica(build(number)) for number in range(len(servers))]
    router, changes = cluster.make_router(), cluster.changes()
    staleness = router.report_interval if cluster.staleness is None else cluster.staleness
    ask, seed = RouterTexts(router), scenario.seed
    if changes is None:
        return Fleet(replicas, router, requests, ask, seed, staleness), clocks
    return ChangingFleet(replicas, router, requests, ask, seed, staleness, build, changes), clocks
