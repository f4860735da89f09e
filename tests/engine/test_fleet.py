"""Replicas behind a router: their steps are those of servers that get the same requests without a router."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Optional

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import ClientRequest
from servesim.core.content import content_of_pieces
from servesim.routers import ROUTERS, Asked, Fleet, Router
from servesim.runs.simulate import Run, simulate
from servesim.testing import TIMES
from servesim.traces.trace import Trace

COST = {"prefill": 0.005, "prefill_token": 6e-5, "decode_step": 0.015, "decode_row": 5e-5, "context": 1.2e-7}
POLICIES: list[dict[str, Any]] = [
    {"name": "vllm-v1", "max_num_seqs": 8},
    {"name": "vllm-v1", "async_scheduling": False, "enable_prefix_caching": False},
    {"name": "sglang", "max_running_requests": 8},
    {"name": "llm-serving", "decode_batch": 8},
    {"name": "mindie"},
    {"name": "vllm"},
]
LEARNING = ["least-requests", "power-of-two", "vllm-dp", "llm-d", "dynamo-kv", "sglang-cache-aware", "sticky"]


def make_trace(seed: int, requests: int = 150, rate: float = 40.0, follow: float = 0.0) -> Trace:
    """Return random requests; some share a prefix, some have a session, and some follow another one."""
    rng, now, made = random.Random(seed), 0.0, []
    for number in range(requests):
        now += rng.expovariate(rate)
        prompt, group = rng.randint(1, 200), rng.randint(0, 5)
        content = content_of_pieces([(f"system {group}", 64), (("own", number), prompt)])
        follows = rng.randrange(number) if number and rng.random() < follow else None
        made.append(
            ClientRequest(
                number, now, 64 + prompt, rng.randint(1, 60), session=f"user {group}", content=content, follows=follows,
                think_time=None if follows is None else rng.choice([0.0, 0.01, 0.5]),
            )
        )  # fmt: skip
    return Trace(made, "random", "synth")


def tree(policy: dict[str, Any], cluster: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Return a scenario with few blocks."""
    scenario = {"policy": policy, "engine": {"num_blocks": 120, "block_size": 16}, "profile": COST}
    return scenario if cluster is None else {**scenario, "cluster": cluster}


def times(run: Run) -> dict[Any, tuple[Any, ...]]:
    """Return all times of each request."""
    return {request.id: (request.sent, *TIMES(request), request.cached_tokens) for request in run.requests}


def seconds(run: Run) -> dict[Any, tuple[float, ...]]:
    """Return the sums of seconds of each request. They have a rounding error if steps are split differently."""
    return {request.id: (request.queued, request.prefilling, request.decoding) for request in run.requests}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())))
def test_one_replica_equals_no_cluster(policy: dict[str, Any]) -> None:
    for follow in (0.0, 0.4):
        trace = make_trace(1, 24, follow=follow)
        alone = simulate(scenario_from(tree(policy)), trace)
        for router in ROUTERS:
            run = simulate(scenario_from(tree(policy, {"replicas": 1, "router": router})), trace)
            assert times(run) == times(alone), router
            assert {key: pytest.approx(value) for key, value in seconds(alone).items()} == seconds(run), router
            assert run.result() == alone.result(), router


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("front_end", [{}, {"end_lag": True}], ids=str)
def test_ends_of_requests_with_drafts_bring_their_followers_in_time(is_async: bool, front_end: dict[str, Any]) -> None:
    settings = tree({"name": "vllm-v1", "async_scheduling": is_async})
    settings |= {"speculative": {"method": "eagle", "tokens": 2, "acceptance": 0.6}}
    settings["engine"]["front_end"] = front_end
    for seed in range(3):
        trace = make_trace(seed, 40, follow=0.6)
        alone = simulate(scenario_from(settings), trace)
        assert times(simulate(scenario_from({**settings, "cluster": {"replicas": 1}}), trace)) == times(alone)


def test_a_request_that_follows_another_one_does_not_queue_in_the_front_end_of_its_replica() -> None:
    scenario, trace = tree(POLICIES[1]), make_trace(1, 60, follow=0.6)
    scenario["engine"]["front_end"] = {"per_request": 0.02, "per_token": 1e-5, "seconds": 0.01}
    alone = simulate(scenario_from(scenario), trace)
    run = simulate(scenario_from({**scenario, "cluster": {"replicas": 1}}), trace)
    assert times(run) == times(alone)


@pytest.mark.parametrize("policy", POLICIES[:4], ids=lambda policy: policy["name"])
@pytest.mark.parametrize("timeout", [0.5, 2.0])
def test_a_client_that_gives_up_sends_its_next_request_as_without_a_cluster(
    policy: dict[str, Any], timeout: float
) -> None:
    scenario, trace = tree(policy), make_trace(3, 100, 60.0, follow=0.5)
    scenario["engine"]["client_timeout"] = timeout
    alone = simulate(scenario_from(scenario), trace)
    assert any(request.outcome == "lost" for request in alone.requests)
    run = simulate(scenario_from({**scenario, "cluster": {"replicas": 1}}), trace)
    assert times(run) == times(alone)
    assert [request.outcome for request in run.requests] == [request.outcome for request in alone.requests]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())))
def test_other_replicas_get_the_next_request_of_a_client_that_gives_up_in_time(policy: dict[str, Any]) -> None:
    """The client gives up during a step. Its next request is there before the step ends."""
    for seed in range(4):
        settings = tree(policy, {"replicas": 3})
        settings["engine"]["client_timeout"] = 0.5
        trace = make_trace(seed, 60, 60.0, follow=0.6)
        fast, slow = (simulate(scenario_from(settings), trace, hold=on) for on in (True, False))
        assert times(fast) == times(slow)
        assert fast.replicas is not None
        sent = [
            ClientRequest(r.id, r.sent, r.prompt, r.output, session=r.session, content=r.content)
            for r in sorted(fast.requests, key=lambda r: (r.sent, r.follows is not None))
        ]
        known = simulate(scenario_from(settings), Trace(sent, "made", "synth"))  # all of them from the beginning
        assert {key: value[4:7] for key, value in times(known).items()} == {
            key: value[4:7] for key, value in times(fast).items()
        }


@pytest.mark.parametrize("follow", [0.0, 0.4], ids=["open", "followers"])
@pytest.mark.parametrize("router", ["round-robin", "least-requests", "vllm-dp", "llm-d-precise"])
def test_ranks_behind_a_router_take_the_steps_of_ranks_that_have_their_requests(router: str, follow: float) -> None:
    ranks, trace = tree(POLICIES[1]), make_trace(7, 100, 60.0, follow)
    ranks["engine"]["data_parallel_size"] = 3
    run = simulate(scenario_from({**ranks, "cluster": {"router": router}}), trace)
    assert run.replicas is not None and run.replicas.metrics["request_imbalance"] < 1.5
    sent = [
        ClientRequest(r.id, r.sent, r.prompt, r.output, session=run.replicas.name_of(r.id), content=r.content)
        for r in sorted(run.requests, key=lambda r: r.sent)
    ]
    given = simulate(scenario_from(ranks), Trace(sent, "made", "synth"))
    assert times(run) == times(given)


@pytest.mark.parametrize("policy", POLICIES[:4], ids=lambda policy: policy["name"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_round_robin_equals_separate_runs_of_the_split_trace(policy: dict[str, Any], replicas: int) -> None:
    trace = make_trace(2)
    run = simulate(scenario_from(tree(policy, {"replicas": replicas})), trace)
    parts = [
        simulate(scenario_from(tree(policy)), Trace(trace.requests[part::replicas], "random", "synth"))
        for part in range(replicas)
    ]
    assert times(run) == {key: value for part in parts for key, value in times(part).items()}
    assert run.calls == sum(part.calls for part in parts)
    assert run.prompt_tokens_computed == sum(part.prompt_tokens_computed for part in parts)


@dataclass
class Choices:
    """Notes which replica served each request."""

    every_step = False

    def __post_init__(self) -> None:
        self.by_server: dict[int, list[Any]] = {}

    def on_step_start(self, server: Any, step: Any, arrived: list[Any]) -> None:
        self.by_server.setdefault(id(server), []).extend(request.id for request in arrived)

    def replica_of(self, id: Any) -> int:
        """Return the replica of a request; the first one that served a request is 0."""
        return next(number for number, ids in enumerate(self.by_server.values()) if id in ids)

    def on_step_end(self, server: Any, step: Any, now: float, finished: list[Any]) -> None:
        """Nothing to note."""


@pytest.mark.parametrize("router", LEARNING)
def test_the_requests_of_each_replica_in_a_separate_run_have_the_same_times(router: str) -> None:
    policy, trace, seen = POLICIES[0], make_trace(3), Choices()
    run = simulate(scenario_from(tree(policy, {"replicas": 3, "router": router})), trace, [seen])
    assert len(seen.by_server) > 1
    expected = {}
    for ids in seen.by_server.values():
        part = Trace([request for request in trace.requests if request.id in set(ids)], "random", "synth")
        expected.update(times(simulate(scenario_from(tree(policy)), part)))
    assert times(run) == expected


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())))
@pytest.mark.parametrize("follow", [0.0, 0.4], ids=["open", "followers"])
def test_hold_changes_no_time(policy: dict[str, Any], follow: float) -> None:
    for router in ("round-robin", *LEARNING):
        scenario = scenario_from(tree(policy, {"replicas": 4, "router": router}))
        trace = make_trace(4, 70, 80.0, follow)
        fast, slow = (simulate(scenario, trace, hold=hold) for hold in (True, False))
        assert times(fast) == times(slow), router
        assert fast.calls == slow.calls


@pytest.mark.parametrize("front_end", [{"end_lag": True}, {"lag": 2}, {"seconds": 0.004}], ids=str)
def test_the_router_hears_of_ends_at_their_time(front_end: dict[str, Any]) -> None:
    """Also if a client sees its end one call late, and if held steps end early because they lack blocks."""
    for policy in POLICIES:
        scenario = tree(policy, {"replicas": 3, "router": "least-requests"})
        scenario["engine"] = {"num_blocks": 60, "block_size": 16, "front_end": front_end}
        trace = make_trace(6, 120, 40.0)
        fast, slow = (simulate(scenario_from(scenario), trace, hold=fast) for fast in (True, False))
        assert times(fast) == times(slow), policy


def test_a_request_that_follows_another_one_may_go_to_another_replica() -> None:
    requests = [
        ClientRequest(0, 0.0, 100, 10), ClientRequest(1, 0.0, 100, 200),
        ClientRequest(2, 0.0, 100, 10, follows=1, think_time=1.0),
    ]  # fmt: skip
    seen = Choices()
    scenario = scenario_from(tree(POLICIES[0], {"replicas": 2}))
    run = simulate(scenario, Trace(requests, "made", "synth"), [seen])
    first, second, third = run.requests
    assert sorted(seen.by_server.values()) == [[0, 2], [1]]
    assert third.sent == second.client_end + 1.0
    assert third.client_end - third.sent == pytest.approx(first.client_end)  # alone on its replica


class LeastReported(Router):
    """The first replica with the fewest requests by its last report."""

    def choices(self, request: Asked, fleet: Fleet) -> list[int]:
        loads = [replica.waiting + replica.running for replica in fleet.memory.reported]
        return [loads.index(min(loads))]


def test_old_reports_send_a_burst_to_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servesim.config.cluster.ROUTERS", {**ROUTERS, "reported": LeastReported})
    requests = [ClientRequest(number, 0.03 * number, 100, 50) for number in range(12)]
    for staleness, expected in ((0.0, [0, 1, 2, 3]), (0.1, [0, 0, 0, 0, 1, 1, 1, 1]), (10.0, [0] * 12)):
        seen = Choices()
        cluster = {"replicas": 4, "router": "reported", "staleness": staleness}
        simulate(scenario_from(tree(POLICIES[0], cluster)), Trace(requests, "made", "synth"), [seen])
        assert [seen.replica_of(request.id) for request in requests][: len(expected)] == expected


def test_a_replica_that_is_stuck_ends_the_run_with_the_reason() -> None:
    requests = [ClientRequest(number, 0.0, 4 + 400 * number, 4) for number in range(2)]
    scenario = {**tree({"name": "mindie"}), "engine": {"num_blocks": 16, "block_size": 1, "reject_oversized": "never"}}
    alone, run = (
        simulate(scenario_from(each), Trace(requests, "made", "synth"))
        for each in (scenario, {**scenario, "cluster": {"replicas": 2, "router": "least-requests"}})
    )
    assert run.stuck is not None and str(run.stuck) == str(alone.stuck)


def test_the_end_on_a_rank_that_waits_for_others_brings_the_next_request_before_a_later_one() -> None:
    """Rank 1 answers while rank 0 goes on. Its client sees the end at once, as no call of its own blocks the stream."""
    settings = tree({"name": "vllm-v1", "async_scheduling": False}, {"router": "round-robin"})
    settings["engine"] |= {"data_parallel_size": 2, "front_end": {"end_lag": True}}
    requests = [
        ClientRequest("long", 0.0, 16, 8), ClientRequest("short", 0.0, 16, 2),
        ClientRequest("next", 0.0, 16, 2, follows="short", think_time=0.0), ClientRequest("later", 0.039, 16, 2),
    ]  # fmt: skip
    run = simulate(scenario_from({**settings, "profile": {"decode_step": 0.015, "prefill": 0.015}}),
                   Trace(requests, "test", "synth"))  # fmt: skip
    assert run.replicas is not None
    sent = {request.id: request.sent for request in run.requests}
    assert 0.03 < sent["next"] < sent["later"] < 0.045
    assert [run.replicas.name_of(name) for name in ("next", "later")] == ["replica/0", "replica/1"]


def test_a_replica_that_is_stuck_is_named_although_requests_follow_its_own() -> None:
    requests = [
        ClientRequest("small", 0.0, 16, 2), ClientRequest("large", 0.0, 2000, 2),
        ClientRequest("next", 0.0, 16, 2, follows="large"),
    ]  # fmt: skip
    settings = tree({"name": "orca"}, {"router": "round-robin", "replicas": 2})
    settings["engine"]["reject_oversized"] = "never"
    run = simulate(scenario_from(settings), Trace(requests, "test", "synth"))
    assert run.stuck is not None and "request large needs" in str(run.stuck)
