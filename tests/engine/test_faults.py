"""Replicas that crash, restart, become slow, or are added and removed: no request and no block is lost silently."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, ClientRequest
from servesim.costs.device_profile import load_profile
from servesim.routers import ROUTERS
from servesim.runs.build import copy_requests
from servesim.runs.fleet import build_fleet
from servesim.runs.simulate import Run, simulate
from servesim.traces.trace import Trace

from ..run_checks import different_keys, wrong_states
from .test_fleet import COST, POLICIES, make_trace, times, tree

ENDS = ("finished", "lost", "refused", "unanswered", "failed")
TIME = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 5.0]) | st.floats(0, 6)


def faults(replicas: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    fault = st.fixed_dictionaries(
        {
            "at": TIME,
            "replica": st.integers(0, replicas - 1),
            "kind": st.sampled_from(["crash", "crash", "restart", "slow"]),
        },
        optional={"recover": TIME, "factor": st.sampled_from([0.5, 3.0])},
    )
    return st.lists(fault, max_size=6)


def sizes(draw: st.DrawFn, replicas: int) -> dict[str, Any]:
    """Draw a number of replicas, or a rule that adds and removes replicas up to this number."""
    if draw(st.booleans()):
        return {"replicas": replicas}
    scaling = {"min": draw(st.integers(1, replicas)), "max": replicas, "interval": draw(st.sampled_from([0.5, 0.7]))}
    return {"autoscale": {**scaling, "target_queue": 1, "start_up": draw(st.sampled_from([0.0, 1.0]))}}


def pools_apart(draw: st.DrawFn) -> dict[str, Any]:
    """Draw pools of prefill and decode replicas."""
    pools = [{"name": role, "role": role, **sizes(draw, draw(st.integers(1, 3)))} for role in ("prefill", "decode")]
    transfer = {
        "token_bytes": 1, "latency": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "bandwidth": draw(st.sampled_from([2000, 20_000, 10**12])),
        "link": draw(st.sampled_from(["none", "shared", "per_pair"])),
        "choose": draw(st.sampled_from([None, "decode_first"])),
        "min_uncached_tokens": draw(st.sampled_from([None, 100])),
        "timeout": draw(st.sampled_from([None, 0.2, 1.0, 4.0])),
        "on_timeout": draw(st.sampled_from(["fail", "recompute"])),
    }  # fmt: skip
    return {"pools": pools, "transfer": transfer, "decode_router": draw(st.sampled_from(sorted(ROUTERS)))}


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a cluster with faults or a rule that adds and removes replicas; some have prefill and decode apart."""
    cluster = sizes(draw, draw(st.integers(1, 4))) if draw(st.booleans()) else pools_apart(draw)
    replicas = sum(pool.get("replicas") or pool["autoscale"]["max"] for pool in cluster.get("pools", [cluster]))
    return {
        **cluster,
        "router": draw(st.sampled_from(sorted(ROUTERS))),
        "faults": draw(faults(replicas)),
        "retry": draw(st.booleans()),
        "detect": draw(st.sampled_from([0.0, 0.3])),
    }


# The transfer of a request times out, so it ends without a first token.
SLOW_TRANSFERS = {
    "pools": [{"name": role, "role": role, "replicas": 1} for role in ("prefill", "decode")],
    "transfer": {"token_bytes": 1, "bandwidth": 2000, "link": "none", "timeout": 0.2, "on_timeout": "fail"},
    "decode_router": "conductor",
}


@settings(max_examples=25)
@given(
    cluster=clusters(), policy=st.sampled_from(POLICIES), seed=st.integers(0, 99), follow=st.sampled_from([0.0, 0.4])
)
@example(cluster=SLOW_TRANSFERS, policy={"name": "vllm-v1", "max_num_seqs": 8}, seed=1, follow=0.0)
def test_every_request_ends_and_no_block_is_held(
    cluster: dict[str, Any], policy: dict[str, Any], seed: int, follow: float
) -> None:
    scenario, trace = scenario_from(tree(policy, cluster)), make_trace(seed, 60, 30.0, follow)
    assert scenario.cluster is not None
    requests = copy_requests(trace.requests)
    profile = load_profile(scenario.profile)
    fleet, _ = build_fleet(scenario, scenario.cluster, requests, [], True, profile)
    fleet.run()
    for request in requests:
        assert request.status == "done" and request.outcome in ENDS, request
        assert request.client_end is not None and request.client_end >= request.sent
        assert request.outcome == "finished" or request.reason
    for loop in fleet.loops:
        loop.server.check()
        assert loop.server.pool.held == sum(request._blocks for request in loop.server.finished)
        assert all(request.status == "done" for request in loop.server.all_requests())
        assert not len(loop.inbox) and not loop.server.loading and not loop.server.kept
    assert fleet.transfers is None or not (fleet.transfers.moves or fleet.transfers.copies)
    fleet._tell_router(math.inf)
    assert not fleet._asked  # the routers know that all have ended


def both(policy: dict[str, Any], cluster: dict[str, Any], engine: dict[str, Any], trace: Trace) -> Run:
    """Run with and without held plans. Return the first one; both must be equal."""
    settings = tree(policy, cluster)
    scenario = scenario_from({**settings, "engine": {**settings["engine"], **engine}})
    fast, slow = (simulate(scenario, trace, hold=on) for on in (True, False))
    assert times(fast) == times(slow)
    assert fast.fleet == slow.fleet
    assert set(different_keys(fast, slow)) <= {"replicas"}
    for row, other in zip(replica_rows(fast), replica_rows(slow)):
        assert row == pytest.approx(other)
    return fast


def replica_rows(run: Run) -> list[dict[str, Any]]:
    return [dict(row) for row in run.result().get("replicas", ())]


def check_sums(run: Run) -> None:
    """Compare what a result says about the replicas with what it says about all of them."""
    result, rows = run.result(), replica_rows(run)
    assert sum(result["outcomes"].values()) == len(run.requests)
    assert not wrong_states(run)
    assert sum(result[f"waiting_{kind}"] for kind in ("slots", "budget", "blocks")) <= 1 + 1e-9
    last = max(request.client_end for request in run.requests if request.client_end is not None)
    assert last <= run.end
    if run.scenario.engine.client_timeout is None:  # otherwise a server may go on after its last client
        assert run.end < last + 0.2  # no event after the last answer, such as a fault, makes the run longer
    assert run.fleet.get("replica_seconds", 0.0) <= run.servers * result["makespan"] * (1 + 1e-9)
    for total, name in (("model_calls", "model_calls"), ("completed", "completed"), ("output_throughput",) * 2):
        assert not rows or sum(row[name] for row in rows) == pytest.approx(result[total])
    if rows:
        assert sum(row["busy_s"] for row in rows) / len(rows) == pytest.approx(result["busy_s"])
        assert all(-1e-9 <= row["busy"] <= 1 + 1e-9 for row in rows)
        assert max(row["peak_kv_usage"] for row in rows) == result.get("peak_kv_usage", 0)


@settings(max_examples=15)
@given(
    cluster=clusters(), policy=st.sampled_from(POLICIES), seed=st.integers(0, 99), follow=st.sampled_from([0.0, 0.4]),
    engine=st.sampled_from(
        [{}, {"client_timeout": 0.5}, *[{"front_end": keys} for keys in (
            {"end_lag": True}, {"end_lag": True, "lag": 2}, {"seconds": 0.004},
        )]]
    ),
)  # fmt: skip
def test_hold_changes_no_time(
    cluster: dict[str, Any], policy: dict[str, Any], seed: int, follow: float, engine: dict[str, Any]
) -> None:
    check_sums(both(policy, cluster, engine, make_trace(seed, 50, 30.0, follow)))


def test_a_replica_that_drains_reports_its_last_end_before_it_leaves() -> None:
    """With `end_lag`, the client sees the end when the call after the last one returns, which runs already."""
    requests = [ClientRequest(number, 0.01, 100, 10) for number in range(2)]
    requests += [ClientRequest(2 + number, 0.15 + 0.002 * number, 100, 10) for number in range(20)]
    fault = {"at": 0.1, "replica": 0, "kind": "restart", "recover": 1.0}
    trace = Trace(requests, "made", "synth")
    done = both({"name": "sglang"}, {"replicas": 2, "faults": [fault]}, {"front_end": {"end_lag": True}}, trace)
    last = done.requests[0]
    assert last.finish is not None and last.client_end == pytest.approx(last.finish + COST["decode_step"], abs=2e-4)


def test_ends_of_steps_that_a_report_runs_release_their_followers() -> None:
    """A report at an arrival runs held steps. Their ends bring requests before the replica goes on."""
    only = {"min": 1, "max": 1, "interval": 0.5, "target_queue": 1, "start_up": 0.0}
    policy, trace = {"name": "llm-serving", "decode_batch": 8}, make_trace(1, 50, 30.0, 0.4)
    alone = simulate(scenario_from(tree(policy)), trace)
    for router in ("llm-d", "dynamo-kv"):
        scenario = scenario_from(tree(policy, {"router": router, "autoscale": only}))
        for on in (True, False):
            assert times(simulate(scenario, trace, hold=on)) == times(alone)


def run(cluster: dict[str, Any], requests: list[ClientRequest]) -> Run:
    return simulate(scenario_from(tree(POLICIES[0], cluster)), Trace(requests, "made", "synth"))


def test_a_fault_after_the_last_request_changes_nothing() -> None:
    trace = make_trace(3, 60)
    for router in ("round-robin", "vllm-dp"):
        cluster = {"replicas": 3, "router": router}
        plain = simulate(scenario_from(tree(POLICIES[0], cluster)), trace)
        later = [{"at": 1000, "replica": 1, "recover": 1}]
        faulty = simulate(scenario_from(tree(POLICIES[0], {**cluster, "faults": later})), trace)
        assert times(faulty) == times(plain) and faulty.end == plain.end
        assert set(different_keys(faulty, plain)) <= {"fleet.replica_seconds", "fleet.retried", "replicas"}
        assert [pytest.approx(row) for row in replica_rows(plain)] == replica_rows(faulty)


def test_requests_of_a_crashed_replica_are_sent_again_or_lost() -> None:
    requests = [  # one answers, one has no token
        ClientRequest(0, 0.0, 100, 1000, session="s"), ClientRequest(1, 0.99, 100, 10, session="s"),
    ]  # fmt: skip
    cluster = {"replicas": 2, "router": "sticky"}
    served = run(cluster, requests).replicas.replica_of
    assert served[0] == served[1]
    cluster["faults"] = [{"at": 1.0, "replica": served[0]}]
    answers, waits = run({**cluster, "retry": True}, requests).requests
    assert (answers.outcome, answers.reason) == ("lost", "its replica crashed while it answered")
    assert (waits.outcome, waits.sent, waits.scheduled) == ("finished", 0.99, 1.0)
    answers, waits = run({**cluster, "retry": False}, requests).requests
    assert (waits.outcome, waits.reason, waits.client_end) == ("lost", "its replica crashed", 1.0)


def test_without_a_replica_requests_wait_until_one_returns() -> None:
    requests = [ClientRequest(0, 2.0, 100, 10)]
    fault = {"at": 1.0, "replica": 0, "kind": "crash"}
    (waited,) = run({"faults": [{**fault, "recover": 4.0}]}, requests).requests
    assert (waited.outcome, waited.sent, waited.scheduled) == ("finished", 2.0, 5.0)
    (lost,) = run({"faults": [fault]}, requests).requests
    assert (lost.outcome, lost.reason) == ("lost", "no replica was left")


def test_a_router_that_has_not_noticed_sends_to_a_replica_that_is_gone() -> None:
    requests = [ClientRequest(number, 2.0 + number, 100, 10) for number in range(4)]
    cluster = {"replicas": 2, "faults": [{"at": 1.0, "replica": 1}], "detect": 2.5}
    assert run(cluster, requests).fleet["retried"] == 1  # at 3.0 s; at 3.5 s the router knows
    outcomes = [request.outcome for request in run({**cluster, "retry": False}, requests).requests]
    assert outcomes == ["finished", "lost", "finished", "finished"]


def test_a_crashed_replica_returns_without_its_prefix_cache() -> None:
    content = make_trace(1, 1).requests[0].content
    requests = [ClientRequest(n, 2.0 * n, content.ends[-1], 2, content=content) for n in range(4)]
    crash = {"faults": [{"at": 3.0, "replica": 0, "recover": 0.5}]}
    cached = [request.cached_tokens > 0 for request in run(crash, requests).requests]
    assert cached == [False, True, False, True]


def test_a_slow_replica_has_longer_steps_until_it_recovers() -> None:
    requests = [ClientRequest(number, 10.0 * number, 100, 10) for number in range(3)]
    fault = {"at": 5.0, "replica": 0, "kind": "slow", "factor": 2.0, "recover": 10.0}
    first, second, third = (r.client_end - r.sent for r in run({"faults": [fault]}, requests).requests)
    assert second == pytest.approx(2 * first)
    assert third == pytest.approx(first)


def test_a_replica_that_two_faults_make_slow_is_as_before_after_both() -> None:
    """The one that begins first ends first. A crash ends both, because the server that returns is a new one."""
    requests = [ClientRequest(number, 10.0 * number, 100, 10) for number in range(4)]
    slow = {"replica": 0, "kind": "slow", "factor": 2.0}
    faults = [{**slow, "at": 5.0, "recover": 20.0}, {**slow, "at": 15.0, "recover": 12.0}]
    seconds = [r.client_end - r.sent for r in run({"faults": faults}, requests).requests]
    assert [each / seconds[0] for each in seconds] == pytest.approx([1, 2, 4, 1])
    faults.append({"replica": 0, "kind": "crash", "at": 17.0, "recover": 1.0})
    seconds = [r.client_end - r.sent for r in run({"faults": faults}, requests).requests]
    assert [each / seconds[0] for each in seconds] == pytest.approx([1, 2, 1, 1])


def test_nothing_waits_on_a_server_after_its_crash() -> None:
    """One request fills the replica, another one waits for blocks until both are lost at 1.0."""
    requests = [ClientRequest(0, 0.0, 1000, 500), ClientRequest(1, 0.1, 1000, 500), ClientRequest(2, 9.0, 10, 2)]
    crash = {"at": 1.0, "replica": 0, "recover": 1.0}
    lost = run({"faults": [crash], "retry": False}, requests)
    assert lost.result()["outcomes"] == {"lost": 2, "finished": 1}
    assert 0.8 < lost.result()["waiting_blocks"] * lost.end < 1.0
    assert lost.result()["busy_s"] == pytest.approx(1.0, abs=0.05)


def test_a_restart_loses_nothing() -> None:
    requests = [ClientRequest(number, 0.1 * number, 100, 50) for number in range(60)]
    faults = [{"at": 1.0 + 2 * n, "replica": n, "kind": "restart", "recover": 1.0} for n in range(3)]
    done = run({"replicas": 3, "faults": faults}, requests)
    assert done.result()["outcomes"] == {"finished": 60}
    assert done.fleet["retried"] == 0


def test_the_rule_adds_replicas_for_a_queue_and_removes_them_after_it() -> None:
    requests = [ClientRequest(number, 0.05 * number, 100, 50) for number in range(200)]
    requests += [ClientRequest(200 + number, 30.0 + number, 100, 5) for number in range(10)]
    rule = {"min": 1, "max": 3, "interval": 1.0, "start_up": 2.0, "target_queue": 4}
    scaled = run({"router": "least-requests", "autoscale": rule}, requests)
    alone = run({"router": "least-requests", "autoscale": {**rule, "max": 1}}, requests)
    assert scaled.result()["mean_ttft_ms"] < alone.result()["mean_ttft_ms"]
    assert alone.fleet["replica_seconds"] == alone.end
    assert scaled.end < scaled.fleet["replica_seconds"] < 2 * scaled.end  # paid only while they are there


def run_apart(requests: list[ClientRequest], policy: dict[str, Any] = POLICIES[1], **cluster: Any) -> Run:
    """Run two prefill replicas, 0 and 1, and two decode replicas, 2 and 3; a copy takes 1 s."""
    pools = [{"name": role, "role": role, "replicas": 2} for role in ("prefill", "decode")]
    transfer = {"token_bytes": 1, "bandwidth": 10**15, "latency": 1.0, **cluster.pop("transfer", {})}
    return both(policy, {"pools": pools, "transfer": transfer, **cluster}, {}, Trace(requests, "made", "synth"))


PREFILL, STEP = COST["prefill"] + 100 * COST["prefill_token"], COST["decode_step"] + COST["decode_row"]


def test_a_prefill_replica_that_crashes_while_it_computes_is_replaced() -> None:
    for policy in (POLICIES[1], POLICIES[2]):
        for retry in (True, False):
            crash = [{"at": PREFILL / 2, "replica": 0}]
            done = run_apart([ClientRequest(0, 0.0, 100, 2)], policy, faults=crash, retry=retry)
            request = done.requests[0]
            if retry:
                assert (request.outcome, request.scheduled, done.fleet["retried"]) == ("finished", PREFILL / 2, 1)
            else:
                assert (request.outcome, request.reason) == ("lost", "its replica crashed")


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[2]], ids=["vllm-v1", "sglang"])
@pytest.mark.parametrize("what", ["fail", "recompute"])
def test_kv_of_a_prefill_replica_that_crashes_during_the_copy_is_lost(policy: dict[str, Any], what: str) -> None:
    """The decode replica notices it 0.25 s later."""
    crash = [{"at": 0.5, "replica": 0}]
    done = run_apart(
        [ClientRequest(0, 0.0, 100, 2)], policy, transfer={"on_timeout": what}, faults=crash, detect=0.25
    )  # fmt: skip
    request = done.requests[0]
    if what == "fail":
        assert (request.outcome, request.reason) == ("failed", "its prefill replica crashed")
        assert request.finish == 0.75
    else:
        assert request.outcome == "finished" and request.first_token == pytest.approx(0.75 + PREFILL, abs=2e-3)


def test_a_prefill_replica_that_crashes_after_the_copy_changes_nothing() -> None:
    plain = run_apart([ClientRequest(0, 0.0, 100, 50)])
    assert times(run_apart([ClientRequest(0, 0.0, 100, 50)], faults=[{"at": 1.2, "replica": 0}])) == times(plain)


def test_requests_of_a_decode_replica_that_crashes_are_sent_again_or_lost() -> None:
    """Request 0 answers, the KV of request 1 is on its way. Its second prefill is on the other replica."""
    requests = [ClientRequest(0, 0.0, 100, 99), ClientRequest(1, 1.0, 100, 2), ClientRequest(2, 1.1, 100, 2)]
    crash = [{"at": 1.5, "replica": replica} for replica in (2, 3)]
    done = run_apart(requests, faults=[{**crash[0], "recover": 0.1}, {**crash[1], "recover": 0.1}])
    answers, waits, _ = done.requests
    assert (answers.outcome, answers.reason) == ("lost", "its replica crashed while it answered")
    assert (waits.outcome, waits.scheduled) == ("finished", 1.5)
    assert done.fleet["retried"] == 2


@pytest.mark.parametrize("timeout", [None, 4.0])
def test_blocks_of_a_decode_replica_that_crashed_stay_on_the_prefill_side_until_the_time_out(timeout: Any) -> None:
    """Two prompts fill the only prefill replica. At 0.5, the decode replica crashes; a third prompt waits."""
    requests = [ClientRequest(number, 0.3 * (number == 2), 100, 2) for number in range(3)]
    pools = [
        {"name": "p", "role": "prefill", "engine": {"num_blocks": 15}}, {"name": "d", "role": "decode", "replicas": 2},
    ]  # fmt: skip
    crash = [{"at": 0.5, "replica": replica} for replica in (1, 2)]
    done = run_apart(requests, pools=pools, transfer={"timeout": timeout}, faults=crash, retry=False)
    assert [request.outcome for request in done.requests] == ["lost", "lost", "lost"]
    # The third prefill starts when the blocks of the others are free.
    assert done.end == pytest.approx(0.5 if timeout is None else 4.0, abs=0.1)
    # Its own blocks are free after another time-out, when no answer is left.
    fleet, _ = build_fleet(done.scenario, done.scenario.fleet, copy_requests(requests), [], True, done.profile)
    fleet.run()
    assert fleet.replicas[0].loop.now == pytest.approx(0.5 if timeout is None else 2 * 4.0, abs=0.1)
    assert not fleet.loops[0].server.kept


def test_a_prefill_replica_that_restarts_stays_until_its_kv_is_copied() -> None:
    restart = [{"at": 0.005, "replica": 0, "kind": "restart", "recover": 1.0}]
    requests = [ClientRequest(number, 0.0 if number == 0 else 3.0, 100, 2) for number in range(3)]
    done = run_apart(requests, faults=restart)
    assert done.result()["outcomes"] == {"finished": 3}
    assert times(done) == times(run_apart(requests))


def test_pools_grow_by_their_own_rules() -> None:
    requests = [ClientRequest(number, 0.02 * number, 400, 10) for number in range(200)]
    rule = {"min": 1, "max": 3, "interval": 0.5, "start_up": 0.5, "target_queue": 2}
    decode = {"name": "d", "role": "decode", "engine": {"num_blocks": 4000}}
    pools = [{"name": "p", "role": "prefill", "autoscale": rule}, decode]
    transfer = {"latency": 0.01}
    scaled = run_apart(requests, pools=pools, transfer=transfer, router="least-requests")
    alone = run_apart(requests, pools=[{**pools[0], "autoscale": {**rule, "max": 1}}, pools[1]], transfer=transfer)
    assert scaled.result()["mean_ttft_ms"] < alone.result()["mean_ttft_ms"]
    assert scaled.replicas.rows[1]["requests"] > 0


def test_wrong_faults_are_refused() -> None:
    for cluster, text in (
        ({"replicas": 2, "faults": [{"at": 1, "replica": 2}]}, "faults of replicas 0 to 1 only"),
        ({"replicas": 2, "autoscale": {"max": 4}}, "autoscale without replicas and pools"),
        ({"autoscale": {"min": 5, "max": 4}}, "min of at most max"),
        ({"pools": [{"name": "a", "replicas": 2, "autoscale": {"max": 4}}]}, "one of replicas and autoscale"),
    ):
        with pytest.raises(BadInput, match=text):
            scenario_from(tree(POLICIES[0], cluster))
