"""`sim replay --url A --url B`: the router of the scenario sends to several servers, as in the simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from servesim.calibrate.client.load_generator import send
from servesim.calibrate.client.protocols import OpenAI
from servesim.calibrate.client.routed import RoutedServers
from servesim.calibrate.replay.http_client import add_simulated_counts
from servesim.config.scenario import scenario_from
from servesim.core import Request
from servesim.routers import Asked, Fleet, Replica
from servesim.routers.simple import LeastRequests
from servesim.runs.simulate import simulate
from servesim.traces.trace import Trace

from ...commands.running import run_sim
from ...events import PATIENCE_S
from ..server.fleet import serving_fleet

SCENARIO = """
workload:
  requests: 16
  arrivals: {kind: constant, rate: 20}
  lengths: {prompt: [40, 40], output: [8, 8]}
  prefixes: {count: 1, tokens: 160, share: 1.0}
policy: {name: vllm-v1, max_num_seqs: 8}
engine: {num_blocks: 400, block_size: 16, max_model_len: 2048}
profile: {base: 0.002, prefill_token: 0.00001, decode_live: 0.0001}
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    scenario = tmp_path_factory.mktemp("fleet") / "scenario.yaml"
    scenario.write_text(SCENARIO)
    with serving_fleet(scenario, 2) as (urls, _):
        yield str(scenario), urls


@pytest.mark.parametrize(
    ("router", "requests", "cached"),
    [("round-robin", [8, 8], [7 * 160, 7 * 160]), ("sglang-cache-aware", [16, 0], [15 * 160, 0])],
)  # one prefix for all: a router that follows it uses one server
def test_the_servers_get_the_requests_of_the_simulated_replicas(
    fleet: tuple[str, list[str]], router: str, requests: list[int], cached: list[int], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    scenario, urls = fleet
    rows = [  # one after the other, so that a request finds the blocks of the one before
        {"id": k, "arrival_s": 0.0, "prompt_tokens": 200, "output_tokens": 8,
         "content": [["all", 160], [f"own {k}", 40]], **({"follows": k - 1} if k else {})}
        for k in range(16)
    ]  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["replay", scenario, "--trace", str(trace), "--url", urls[0], "--url", urls[1], "--router", router]
    said = run_sim(capsys, *command, "--quiet", "-o", str(tmp_path / "out"))
    assert said.code == 0, said.error
    servers = json.loads((tmp_path / "out" / "live" / "result.json").read_text())["servers"]
    assert [server["url"] for server in servers] == urls
    assert [server["requests"] for server in servers] == requests
    assert [server["cached_tokens"] for server in servers] == cached
    both = [{"requests": count, "cached_tokens": tokens} for count, tokens in zip(requests, cached)]
    assert [server["simulated"] for server in servers] == both
    for url, count, tokens in zip(urls, requests, cached):
        line = (
            f"{count} requests (simulated {count}), {tokens} prompt tokens from its prefix cache (simulated {tokens})"
        )
        assert f"\n{url}: {line}\n" in said.out
    assert " on 2 servers (measured) " in said.out


@dataclass(frozen=True)
class Watched(LeastRequests):
    """Writes down what it is told."""

    told: list[Any] = field(default_factory=list)

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        self.told.append(("sent", request.id, replica))

    def prefilled(self, memory: Any, request: Asked, replica: int) -> None:
        self.told.append(("first token", request.id, replica))

    def ended(self, memory: Any, request: Asked, replica: int) -> None:
        super().ended(memory, request, replica)
        self.told.append(("end", request.id, replica))

    def reported(self, memory: Any, replicas: Sequence[Replica]) -> None:
        self.told.append(replicas)


def test_a_router_is_told_of_first_tokens_ends_and_queues(fleet: tuple[str, list[str]]) -> None:
    router = Watched()
    servers = RoutedServers(fleet[1], router, lambda r: Asked(r.id, "", r.prompt), 0.02, 0)
    load = send(fleet[1][0], OpenAI("fake"), [Request("a", 0.0, 40, 1500), Request("b", 0.05, 40, 1500)], PATIENCE_S,
                servers=servers)  # fmt: skip
    assert [sent.outcome for sent in load.sent_requests] == ["finished"] * 2
    first = next(told[2] for told in router.told if told[:2] == ("sent", "a"))
    for name, replica in (("a", first), ("b", 1 - first)):  # the second one is sent while the first one runs
        events = [told for told in router.told if isinstance(told, tuple) and told[1] == name]
        assert events == [("sent", name, replica), ("first token", name, replica), ("end", name, replica)]
    reports = [told for told in router.told if isinstance(told, list)]
    assert any(report[first].running == 1 and report[first].kv_usage > 0 for report in reports)
    assert servers.requests == [1, 1]


def test_a_router_that_asks_the_caches_of_servers_is_refused(
    fleet: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, urls = fleet
    command = ["replay", scenario, "--url", urls[0], "--url", urls[1], "--limit", "2", "--live-only", "--quiet"]
    said = run_sim(capsys, *command, "--router", "dynamo-kv")
    assert said.code == 2
    assert said.error.startswith("sim: cluster.router dynamo-kv: asks what the servers have cached")
    own_memory = ("--set", "cluster.replicas=2", "--set", "cluster.router={name: dynamo-kv, use_kv_events: false}")
    assert run_sim(capsys, *command, *own_memory).code == 0
    assert run_sim(capsys, *command, "--router", "llm-d").code == 0


def test_the_order_of_a_real_router_is_given_by_the_numbers_of_requests() -> None:
    cluster = {"cluster": {"replicas": 2}, "policy": {"name": "vllm-v1"}, "profile": {"base": 0.01}}
    trace = Trace([Request(id, 10.0 * id, 10, 1) for id in range(3)], "three", "synth")
    run = simulate(scenario_from(cluster), trace)
    assert run.replicas is not None and run.replicas.replica_of == {0: 0, 1: 1, 2: 0}
    servers: list[dict[str, Any]] = [{"url": "a", "requests": 1}, {"url": "b", "requests": 2}]
    add_simulated_counts(servers, run, same_order=False)
    assert [server["simulated"]["requests"] for server in servers] == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--url", "http://a", "--router", "random"), "--router: expected together with several --url"),
        (
            ("--url", "http://a", "--url", "http://b", "--server", "http://c"),
            "--server: expected together with one --url, the address of a router",
        ),
        (
            ("--url", "http://a", "--url", "http://b", "--set", "cluster.replicas=3"),
            "--url: expected 3 addresses, one for each replica of the scenario, got 2",
        ),
        (
            ("--url", "http://a", "--url", "http://b", "--router", "nearest"),
            "--router.name: no router 'nearest'; known",
        ),
        (("--backend", "fake", "--set", "cluster.replicas=2"), "cluster: a backend runs one server; start the servers"),
    ],
)
def test_wrong_options_are_one_line(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)
    said = run_sim(capsys, "replay", str(scenario), *options)
    assert said.code == 2
    assert said.error.startswith(f"sim: {message}")
    assert said.error.count("\n") == 1
