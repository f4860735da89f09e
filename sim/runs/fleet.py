"""Simulate a cluster: build the replicas of its pools and what the router sees of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

from servesim.config.cluster import Cluster
from servesim.config.scenario import Scenario, scenario_of_pool
from servesim.core import Request
from servesim.costs.device_profile import Profile, load_profile
from servesim.engine.fleet import Fleet
from servesim.engine.replica import Replica
from servesim.engine.simulated import SimulatedClock
from servesim.routers.router import CHARACTERS_PER_TOKEN, Asked, Router

from .build import build_simulation

TextOf = Callable[[Request], str]  # the prompt of a request
HTTP_BODY = 300  # bytes of a request beside its prompt: model, limits, headers of the message


class RouterTexts:
    """The text of requests as a router sees it. Equal pieces of prompts have equal characters."""

    def __init__(self, router: Router, text_of: Optional[TextOf] = None) -> None:
        self._reads_text = router.reads_text
        self._text_of = text_of or self.text
        self._numbers: dict[Any, int] = {}  # name of a text -> its number

    def __call__(self, request: Request) -> Asked:
        size = CHARACTERS_PER_TOKEN * request.prompt
        text = self._text_of(request) if self._reads_text else ""
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
    profile: Profile, text_of: Optional[TextOf] = None,
) -> tuple[Fleet, list[SimulatedClock]]:  # fmt: skip
    """Return the replicas of a scenario behind their router, and their clocks; `text_of`: texts of real prompts."""
    replicas: list[Replica] = []
    clocks = []
    for pool in cluster.all_pools:
        server = scenario_of_pool(scenario, pool)
        of_pool = profile if pool.profile is None else load_profile(server.profile)
        for _ in range(pool.replicas):
            own = server.model_copy(update={"seed": scenario.seed + len(replicas)})  # each has noise of its own
            loop, clock = build_simulation(own, [], observers, fast_forward, of_pool)
            loop.server.name = cluster.names[len(replicas)] if cluster.size > 1 else ""
            replicas.append(Replica(loop, loop.fast_forward))
            clocks.append(clock)
    router = cluster.make_router()
    staleness = router.report_interval if cluster.staleness is None else cluster.staleness
    fleet = Fleet(replicas, router, requests, RouterTexts(router, text_of), scenario.seed, staleness)
    return fleet, clocks
