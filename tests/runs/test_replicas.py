"""Metrics, files, logs and timelines of a fleet: a replica is a server that runs alone, and the fleet is their sum."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import Request
from servesim.runs.decision_log import InMemoryLog
from servesim.runs.replicas import imbalance, replica_lines
from servesim.runs.run_folder import read_run, write_run
from servesim.runs.simulate import Run, load_trace, simulate
from servesim.runs.text import show_run
from servesim.runs.timeline import QueueLog, Timeline
from servesim.traces.trace import Trace

from ..conftest import ROOT
from ..study import sweeps

SHARED = {  # prompts that share beginnings, and few KV blocks: hits, evictions and preemptions
    "workload": {
        "requests": 80, "arrivals": {"kind": "poisson", "rate": 60},
        "lengths": {"kind": "uniform", "prompt": [50, 400], "output": [20, 120]},
        "prefixes": {"count": 4, "tokens": 160, "share": 0.8},
    },
    "policy": {"name": "vllm-v1"}, "profile": "h200-llama3.1-8b", "engine": {"num_blocks": 160},
}  # fmt: skip
SECONDS = {"kind": "linear", "prefill": 0.5, "decode_step": 0.25}


def fleet(replicas: int = 2, router: str = "round-robin", **keys: Any) -> dict[str, Any]:
    return {**SHARED, **keys, "cluster": {"replicas": replicas, "router": router}}


@pytest.fixture(scope="module")
def parts() -> tuple[Run, list[Run], list[InMemoryLog]]:
    """Return a fleet of two replicas that take requests in turn, and both halves of its trace run alone."""
    trace = load_trace(scenario_from(SHARED))
    logs = [InMemoryLog() for _ in range(3)]
    whole = simulate(scenario_from(fleet()), trace, [logs[0]])
    halves = [
        simulate(
            scenario_from({**SHARED, "seed": k}), Trace(list(trace.requests)[k::2], "half", "synth"), [logs[1 + k]]
        )
        for k in range(2)
    ]
    return whole, halves, logs


def test_two_ranks_by_hand(tmp_path: Path) -> None:
    """Prefill 0.5 s of both, 3 decodes of 0.25 s of a. At 2 s, c runs alone for 0.5 s. Both ranks wait from 1.25 s."""
    tree = {"policy": {"name": "llm-serving"}, "profile": SECONDS, "engine": {"data_parallel_size": 2}}
    requests = [Request("a", 0.0, 4, 4), Request("b", 0.0, 4, 1), Request("c", 2.0, 4, 1)]
    scenario = scenario_from(tree)
    assert scenario.fleet is not None
    with Timeline(tmp_path / "t.json", scenario.fleet.names) as timeline:
        run = simulate(scenario, Trace(requests, "test", "synth"), [timeline])
    assert (run.end, run.busy_seconds) == (2.5, 1.75)
    rows = [(row["requests"], row["busy_s"], row["model_calls"]) for row in run.result()["replicas"]]
    assert rows == [(2, 1.75, 5), (1, 0.5, 1)]
    write_run(run, tmp_path / "run")
    with (tmp_path / "run" / "requests.csv").open() as file:
        assert [row["replica"] for row in csv.DictReader(file)] == ["replica/0", "replica/1", "replica/0"]
    assert re.search(r"Router: +ranks in turn", show_run(run))


def test_two_requests_by_hand() -> None:
    """Replica 0: 4 tokens, prefill 0.5 s, 3 decodes of 0.25 s; replica 1: one token at 1.0 s. The run ends at 1.5 s."""
    tree = {"policy": {"name": "llm-serving"}, "profile": SECONDS, "cluster": {"replicas": 2}}
    requests = [Request("a", 0.0, 4, 4), Request("b", 1.0, 4, 1)]
    run = simulate(scenario_from(tree), Trace(requests, "test", "synth"))
    first, second = run.result()["replicas"]
    assert [row["name"] for row in (first, second)] == ["replica/0", "replica/1"]
    assert [row["requests"] for row in (first, second)] == [1, 1]
    assert (first["busy_s"], second["busy_s"]) == (1.25, 0.5)
    assert first["busy"] == pytest.approx(1.25 / 1.5)
    assert first["output_throughput"] == pytest.approx(4 / 1.5)
    assert (first["mean_ttft_ms"], second["mean_ttft_ms"]) == (500, 500)
    assert run.result()["busy_imbalance"] == pytest.approx(1.25 / 0.875)
    assert run.result()["request_imbalance"] == 1
    assert run.result()["busy_s"] == pytest.approx(0.875)


def test_the_imbalance_is_the_number_of_replicas_if_one_has_all_load() -> None:
    assert imbalance([3.0, 0.0, 0.0, 0.0]) == 4
    assert imbalance([2, 2]) == imbalance([0, 0]) == 1


def test_the_row_of_a_replica_is_that_of_a_server_that_runs_alone(parts: Any) -> None:
    whole, halves, _ = parts
    for row, half in zip(whole.result()["replicas"], halves):
        alone = half.result()
        assert row["completed"] == row["requests"] == alone["completed"]
        for name in ("mean_ttft_ms", "prefix_hit_rate", "busy_s", "peak_kv_usage", "preemptions", "model_calls"):
            assert row[name] == pytest.approx(alone[name], rel=1e-12), name


def test_the_metrics_of_a_fleet_are_sums_over_its_replicas(parts: Any) -> None:
    whole, halves, _ = parts
    result, alone = whole.result(), [half.result() for half in halves]
    for name in (
        "preemptions", "model_calls", "prefix_cache_queries", "prefix_cache_hits", "prefix_cache_evictions",
        "prompt_tokens_computed",
    ):  # fmt: skip
        assert result[name] == alone[0][name] + alone[1][name] > 0, name
    assert result["prefix_hit_rate"] == result["prefix_cache_hits"] / result["prefix_cache_queries"]
    for name in ("waiting_slots", "waiting_budget", "waiting_blocks"):
        seconds = sum(half[name] * run.end for half, run in zip(alone, halves))
        assert result[name] == pytest.approx(seconds / (2 * whole.end))
    power, tokens = whole.profile.about["power"], [half["total_output_tokens"] for half in alone]
    joules = sum(half["energy"] * count / 1000 for half, count in zip(alone, tokens))
    joules += power["idle"] * sum(whole.end - half.end for half in halves)  # the first one to finish is idle
    assert result["energy"] == pytest.approx(1000 * joules / sum(tokens))


def test_the_lines_of_a_replica_in_the_decision_log_are_those_of_a_server_that_runs_alone(parts: Any) -> None:
    _, _, logs = parts
    for number in range(2):
        rows = [row for row in logs[0].rows if row["replica"] == f"replica/{number}"]
        for row, alone in zip(rows, logs[1 + number].rows):
            del row["replica"]
            assert {**row, "step": 0} == {**alone, "step": 0}
        assert len(rows) == len(logs[1 + number].rows)


def test_one_replica_writes_the_files_of_a_server_without_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text(json.dumps(SHARED))
    (tmp_path / "one.json").write_text(json.dumps(fleet(1, "least-requests")))
    for name in ("plain", "one"):
        words = ["--decisions", tmp_path / name / "log.jsonl", "--timeline", tmp_path / name / "timeline.json"]
        assert sweeps.sim("run", tmp_path / f"{name}.json", "-o", tmp_path / name, *words) == 0
    for file in ("result.json", "requests.csv", "log.jsonl", "timeline.json"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_the_files_of_a_fleet_name_the_replica_and_are_read_back(tmp_path: Path, parts: Any) -> None:
    whole = parts[0]
    write_run(whole, tmp_path)
    with (tmp_path / "requests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["replica"] for row in rows] == [f"replica/{number % 2}" for number in range(80)]
    data = read_run(tmp_path)
    assert data.result["replicas"] == whole.result()["replicas"]
    assert [row["replica"] for row in data.requests.values()] == [row["replica"] for row in rows]


def test_the_page_on_clusters_names_every_key_of_a_replica(parts: Any) -> None:
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(\w+)`", text))
    assert set(parts[0].result()["replicas"][0]) <= names


@pytest.mark.parametrize("router", ["round-robin", "least-requests"])
def test_a_timeline_has_a_group_of_tracks_per_replica(tmp_path: Path, router: str) -> None:
    scenario = scenario_from(fleet(3, router))
    assert scenario.cluster is not None
    with Timeline(tmp_path / "t.json", scenario.cluster.names) as timeline:
        run = simulate(scenario, observers=[timeline])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(groups.values()) == ["replica/0", "replica/1", "replica/2", "requests"]
    rows = {row["name"]: row for row in run.result()["replicas"]}
    steps = Counter(groups[event["pid"]] for event in events if event["ph"] == "X")
    assert steps == {name: row["model_calls"] for name, row in rows.items()}
    hits = {groups[e["pid"]]: e["args"]["hits"] / 100 for e in events if e["name"] == "prefix cache hits so far (%)"}
    assert hits == {name: pytest.approx(row["prefix_hit_rate"]) for name, row in rows.items()}
    begins = [event["args"]["replica"] for event in events if event["ph"] == "b" and "replica" in event["args"]]
    assert Counter(begins) == {name: row["requests"] for name, row in rows.items()}


def test_a_timeline_of_prefill_and_decode_apart_has_every_request(tmp_path: Path) -> None:
    """Also those that are sent again after a crash, and those whose KV does not come."""
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "replicas": 2}]
    faults = [{"at": 0.3, "replica": 1, "recover": 0.1}, {"at": 0.6, "replica": 0, "recover": 0.1}]
    cluster = {"pools": pools, "faults": faults, "transfer": {"latency": 0.05}}
    scenario = scenario_from({**SHARED, "engine": {"num_blocks": 4000}, "cluster": cluster})
    assert scenario.cluster is not None
    with Timeline(tmp_path / "t.json", scenario.cluster.names) as timeline:
        run = simulate(scenario, observers=[timeline])
    assert set(run.result()["outcomes"]) == {"finished", "lost", "failed"}
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    begins, ends = (Counter((e["id"], e["name"]) for e in events if e["ph"] == phase) for phase in "be")
    assert begins == ends
    for request in run.requests:
        assert begins[str(request.id), f"request {request.id}"] >= 1
        assert begins[str(request.id), "decode"] >= (request.outcome == "finished")


def test_a_timeline_counts_the_drafts_of_a_server_after_a_crash_anew(tmp_path: Path) -> None:
    drafts = {"method": "eagle", "tokens": 2, "acceptance": 0.6}
    cluster = {"replicas": 2, "faults": [{"at": 0.5, "replica": 0, "recover": 0.1}]}
    scenario = scenario_from({**SHARED, "speculative": drafts, "cluster": cluster})
    with Timeline(tmp_path / "t.json", ["replica/0", "replica/1"]) as timeline:
        run = simulate(scenario, observers=[timeline])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = [event["args"] for event in events if event["ph"] == "X"]
    assert min(step["accepted"] for step in steps) >= 0
    accepted, drafted = (sum(step[name] for step in steps) for name in ("accepted", "drafts"))
    assert accepted / drafted == pytest.approx(run.result()["draft_acceptance_rate"])


class Held(QueueLog):
    """A queue log that does not need every step."""

    every_step = False


@pytest.mark.parametrize("router", ["round-robin", "least-requests", "sglang-cache-aware"])
def test_a_queue_log_adds_the_replicas_up(router: str) -> None:
    every, held = QueueLog(50), Held(50)
    plain, first, second = (simulate(scenario_from(fleet(3, router)), None, log) for log in ([], [every], [held]))
    assert (
        [r.finish for r in plain.requests] == [r.finish for r in first.requests] == [r.finish for r in second.requests]
    )
    for log in (every, held):
        assert set(log.replicas) == {"replica/0", "replica/1", "replica/2"}
        assert len(log.times) == len(log.queues) == 51 and log.times == sorted(log.times)
        assert (log.queues[-1].running, log.queues[-1].waiting, log.queues[-1].blocks_used) == (0, 0, 0)
        assert log.queues[-1].hits == plain.result()["prefix_cache_hits"]
        assert all(one.times == sorted(one.times) and len(one.times) < 100 for one in log.replicas.values())
    top = max(state.running + state.waiting for state in every.queues)
    assert max(one.running + one.waiting for log in every.replicas.values() for one in log.queues) <= top <= 80


def test_kv_usage_counts_pools_of_different_sizes() -> None:
    pools = [{"name": "small", "engine": {"num_blocks": 101}}, {"name": "large", "engine": {"num_blocks": 1001}}]
    run = simulate(scenario_from({**SHARED, "cluster": {"pools": pools}}))
    result = run.result()
    small, large = result["replicas"]
    assert (small["name"], large["name"]) == ("small/0", "large/0")
    assert result["peak_kv_usage"] == max(small["peak_kv_usage"], large["peak_kv_usage"]) <= 1
    assert small["peak_kv_usage"] > large["peak_kv_usage"] > 0
    assert result["mean_kv_usage"] < result["peak_kv_usage"]
    assert result["mfu"] is not None


def test_pools_with_other_profiles_have_no_common_utilisation() -> None:
    pools = [{"name": "a"}, {"name": "b", "profile": "h200-llama2-7b"}]
    run = simulate(scenario_from({**SHARED, "cluster": {"pools": pools}}))
    assert run.result()["mfu"] is None and run.result()["energy"] is None
    assert run.outside_profile == []


def test_the_steps_of_a_pool_are_compared_with_its_own_profile() -> None:
    """The CPU profile was measured with a few rows of a tiny model."""
    pools = [{"name": "gpu"}, {"name": "cpu", "profile": "cpu-tiny-kbk"}]
    load = {"requests": 60, "arrivals": {"kind": "burst"}, "lengths": {"kind": "fixed", "prompt": 900, "output": 4}}
    tree = {**SHARED, "workload": load, "engine": {"num_blocks": 4000}, "cluster": {"pools": pools}}
    outside = simulate(scenario_from(tree)).outside_profile
    assert outside and all(text.startswith("cpu: ") for text in outside)


def test_a_prefix_cache_of_one_pool_counts() -> None:
    pools = [{"name": "a", "policy": {"enable_prefix_caching": False}}, {"name": "b"}]
    result = simulate(scenario_from({**SHARED, "cluster": {"pools": pools}})).result()
    assert result["replicas"][0]["prefix_hit_rate"] is None
    assert result["replicas"][1]["prefix_hit_rate"] == result["prefix_hit_rate"] > 0


def test_a_stuck_replica_ends_the_run_at_its_time() -> None:
    requests = [Request("a", 0.0, 8, 4), Request("b", 0.5, 4000, 4), Request("c", 0.5, 8, 4)]
    tree = {
        "policy": {"name": "vllm-v1"}, "profile": SECONDS, "cluster": {"replicas": 2},
        "engine": {"num_blocks": 20, "reject_oversized": "never"},
    }  # fmt: skip
    run = simulate(scenario_from(tree), Trace(requests, "test", "synth"))
    assert run.stuck is not None and run.end > 0 and run.result()["replicas"][0]["busy_s"] > 0


def test_sim_run_prints_the_replicas_and_the_busiest_one() -> None:
    run = simulate(scenario_from(fleet(10)))
    lines = show_run(run).splitlines()
    start = next(place for place, line in enumerate(lines) if " Replicas " in line)
    assert lines[start + 1].split() == ["Replicas:", "10"] and lines[start + 2].split() == ["Router:", "round-robin"]
    head, *rows = lines[start + 5 : start + 15]
    assert head.split()[:2] == ["replica", "requests"]
    assert [row.split()[:2] for row in rows[:8]] == [[f"replica/{number}", "8"] for number in range(8)]
    assert rows[8] == "and 2 more"
    busiest = max(run.result()["replicas"], key=lambda row: row["busy_s"])
    assert f"(means over 10 replicas; {busiest['name']} is the busiest: " in run.result()["limit_text"]
    assert not replica_lines([dict.fromkeys(run.result()["replicas"][0], 1)])[-1].startswith("and")


def test_a_busy_fleet_needs_more_replicas() -> None:
    lengths = {"kind": "fixed", "prompt": 400, "output": 100}
    load = {"requests": 200, "arrivals": {"kind": "burst"}, "lengths": lengths}
    engine = {"num_blocks": 9000}
    profile = {"base": 1e-6, "decode_row": 0.01}
    run = simulate(scenario_from(fleet(2, workload=load, engine=engine, profile=profile)))
    assert run.result()["limit"] == "compute" and "but more replicas do" in run.result()["limit_text"]


def test_a_fleet_with_prefill_apart_counts_its_transfers() -> None:
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    run = simulate(scenario_from({**SHARED, "engine": {"num_blocks": 4000}, "cluster": {"pools": pools}}))
    result = run.result()
    assert result["completed"] == result["transfers"] == 80
    assert result["transfer_s"] > 0 and result["transfer_bytes"] > 0
    lines = [text for text in show_run(run).splitlines() if "KV transfers" in text]
    assert [text.split() for text in lines] == [["KV", "transfers:", "80"]]
    assert "transfers" not in simulate(scenario_from(fleet())).result()
