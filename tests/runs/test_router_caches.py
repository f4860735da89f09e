"""Routers that ask the replicas for their prefix caches: what they hear, and that asking changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import ClientRequest
from servesim.core.content import content_of_pieces
from servesim.routers import Asked, Fleet
from servesim.routers.simple import RoundRobin
from servesim.runs.build import copy_requests
from servesim.runs.fleet import build_fleet
from servesim.runs.simulate import load_profile, load_trace, run_loop

HEARD: list[tuple[Any, list[int]]] = []
SMALL: dict[str, Any] = {
    "profile": {"base": 0.01, "prefill_token": 0.0001, "decode_row": 0.001},
    "engine": {"num_blocks": 300, "block_size": 16},
    "workload": {
        "requests": 300, "arrivals": {"kind": "poisson", "rate": 25},
        "lengths": {"prompt": [20, 120], "output": [4, 40]},
        "prefixes": {"count": 6, "tokens": [16, 320]},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Asks(RoundRobin):
    """Each replica in turn, but it asks all of them before."""

    @property
    def learns(self) -> bool:
        return True

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        HEARD.append((request.id, [fleet.cached(replica) for replica in fleet.present]))
        return super().choices(request, fleet)


@pytest.mark.parametrize("policy", ["vllm-v1", "sglang"])
def test_asking_changes_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools are so small that blocks are evicted all the time. A request finds what the router heard, or less."""
    scenario = scenario_from({**SMALL, "policy": policy, "cluster": {"replicas": 3}})
    results = []
    for router in (RoundRobin(), Asks()):
        assert scenario.cluster is not None
        monkeypatch.setattr(type(scenario.cluster), "make_router", lambda cluster, router=router: router)
        requests, profile = copy_requests(load_trace(scenario).requests), load_profile(scenario.profile)
        HEARD.clear()
        fleet, clocks = build_fleet(scenario, scenario.cluster, requests, (), True, profile)
        run = run_loop(fleet, clocks, scenario, profile, requests)
        results.append([(r.id, r.first_token, r.finish, r.cached_tokens) for r in requests])
        assert run.stuck is None
    assert results[0] == results[1]
    assert run.cache_metrics["prefix_cache_evictions"] > 300
    heard = {id: tokens[fleet.replica_of[id]] for id, tokens in HEARD}
    found = {request.id: request.cached_tokens for request in requests}
    assert sum(tokens > 0 for tokens in heard.values()) > 100
    assert sum(heard[id] == found[id] for id in found) > 0.8 * len(found)  # between, others may cache or evict


def test_a_router_hears_of_whole_cached_blocks() -> None:
    """A text of 100 tokens has 6 blocks of 16. The second replica has not seen it."""
    text = content_of_pieces([("shared", 100)])
    requests = [ClientRequest(number, 5.0 * number, 100, 2, content=text) for number in range(3)]
    scenario = scenario_from({**SMALL, "policy": "vllm-v1", "cluster": {"replicas": 2}, "workload": None, "trace": "-"})
    assert scenario.cluster is not None
    HEARD.clear()
    copies, profile = copy_requests(requests), load_profile(scenario.profile)
    fleet, clocks = build_fleet(scenario, scenario.cluster, copies, (), True, profile)
    fleet.router, fleet.is_coupled = Asks(), True
    run_loop(fleet, clocks, scenario, profile, copies)
    assert HEARD == [(0, [0, 0]), (1, [96, 0]), (2, [96, 96])]


CACHING = ("llm-d", "aibrix", "production-stack", "sglang-cache-aware")
CODE = """
import json, sys
from servesim.config.scenario import scenario_from
from servesim.runs.simulate import simulate

for settings in json.loads(sys.argv[1]):
    print([(request.id, request.first_token) for request in simulate(scenario_from(settings)).requests])
"""


@pytest.fixture(scope="module")
def choices() -> list[dict[str, str]]:
    """Return, for two hash seeds, the first tokens of all requests with each router."""
    trees = [{**SMALL, "policy": "vllm-v1", "cluster": {"replicas": 3, "router": router}} for router in CACHING]
    words, found = [sys.executable, "-c", CODE, json.dumps(trees)], []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        text = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
        found.append(dict(zip(CACHING, text.splitlines())))
    return found


@pytest.mark.parametrize("router", CACHING)
def test_choices_do_not_depend_on_the_hash_seed(router: str, choices: list[dict[str, str]]) -> None:
    one, two = choices
    assert one[router] == two[router] and len(one[router]) > 1000
