"""Timelines for Perfetto: one literal example, and invariants of all timelines."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import Request
from servesim.runs.simulate import Run, simulate
from servesim.runs.timeline import QueueLog, Timeline
from servesim.traces.trace import Trace

from ..study import sweeps

Events = list[dict[str, Any]]


def run_with_timeline(path: Path, tree: dict[str, Any], requests: list[Request] | None = None) -> tuple[Events, Run]:
    trace = None if requests is None else Trace(requests, "test", "synth")
    with Timeline(path) as timeline:
        run = simulate(scenario_from(tree), trace, [timeline])
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: Events = json.loads(raw)["traceEvents"]
    return events, run


COSTS = {"kind": "linear", "prefill": 0.5, "decode_step": 0.25}


def test_two_requests_one_after_the_other(tmp_path: Path) -> None:
    tree = {"policy": {"name": "llm-serving", "decode_batch": 1}, "profile": COSTS, "engine": {"num_blocks": 9}}
    events, _ = run_with_timeline(tmp_path / "t.json", tree, [Request("a", 0.0, 4, 2), Request("b", 0.25, 4, 1)])
    steps = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert steps == [("prefill", 0.0, 5e5), ("decode", 5e5, 2.5e5), ("prefill", 7.5e5, 5e5)]
    slices = [(e["id"], e["ph"], e["name"], e["ts"]) for e in events if e["ph"] in "be"]
    assert slices == [
        ("a", "b", "request a", 0.0), ("a", "b", "queued", 0.0), ("a", "e", "queued", 0.0), ("a", "b", "prefill", 0.0),
        ("a", "e", "prefill", 5e5), ("a", "b", "decode", 5e5),
        ("b", "b", "request b", 2.5e5), ("b", "b", "queued", 2.5e5),
        ("a", "e", "decode", 7.5e5), ("a", "e", "request a", 7.5e5),
        ("b", "e", "queued", 7.5e5), ("b", "b", "prefill", 7.5e5),
        ("b", "e", "prefill", 1.25e6), ("b", "e", "request b", 1.25e6),
    ]  # fmt: skip
    queues = [(e["ts"], e["args"]["waiting"], e["args"]["running"]) for e in events if e["name"] == "queues"]
    assert queues == [(0.0, 0, 1), (5e5, 1, 1), (7.5e5, 1, 0), (7.5e5, 0, 1), (1.25e6, 0, 0)]


@pytest.mark.parametrize("queue", ["front", "swapped"])
def test_every_slice_closes_and_states_are_inside_their_request(tmp_path: Path, queue: str) -> None:
    policy = {"name": "llm-serving", "decode_batch": 6, "preempted_to": queue}
    tree = sweeps.base(policy=policy, engine={"num_blocks": 16}, workload=sweeps.workload(60, 20.0))
    events, run = run_with_timeline(tmp_path / "t.json.gz", tree)
    assert sum(request.preemptions for request in run.requests) > 0
    opened: Counter[tuple[str, str]] = Counter()
    spans: dict[str, list[float]] = {}
    for event in sorted((e for e in events if e["ph"] in "be"), key=lambda e: e["ts"]):
        opened[event["id"], event["name"]] += 1 if event["ph"] == "b" else -1
        spans.setdefault(event["id"], []).append(event["ts"])
    assert set(opened.values()) == {0} and len(spans) == 60
    for request in run.requests:
        assert spans[str(request.id)][0] == pytest.approx(1e6 * request.sent, abs=0.01)
        assert spans[str(request.id)][-1] == pytest.approx(1e6 * (request.finish or 0), abs=0.01)
    assert sum(e["name"] == "queued again" and e["ph"] == "b" for e in events) == sum(
        r.preemptions for r in run.requests
    )


def test_steps_never_overlap_and_counters_stay_in_the_pool(tmp_path: Path) -> None:
    tree = sweeps.base(policy={"name": "llm-serving", "decode_batch": 6}, engine={"num_blocks": 16})
    events, run = run_with_timeline(tmp_path / "t.json.gz", tree)
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    assert len(steps) == run.calls
    assert all(end <= start + 0.002 for (_, end), (start, _) in zip(steps, steps[1:]))
    blocks = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "blocks"]
    assert all(held["held"] + held["free"] == 15 and held["free"] >= 0 for held in blocks)
    assert blocks[-1] == {"held": 0, "free": 15}


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_shows_its_drafts(tmp_path: Path, overlaps: bool) -> None:
    """Tight memory: rows of their own, rows of the cohort and preempted ones."""
    tree = sweeps.base(policy={"name": "vllm-v1", "async_scheduling": overlaps}, engine={"num_blocks": 16},
                       workload=sweeps.workload(60, 20.0), speculative={"tokens": 2, "acceptance": 0.5})  # fmt: skip
    events, run = run_with_timeline(tmp_path / "t.json", tree)
    steps, result = [e for e in events if e["ph"] == "X"], run.result()
    assert result["preemptions"] > 0 and {e["name"] for e in steps} == {"prefill", "decode", "mixed"}
    drafts, accepted = (sum(e["args"][name] for e in steps) for name in ("drafts", "accepted"))
    assert accepted / drafts == pytest.approx(result["draft_acceptance_rate"])
    assert all(bool(e["args"]["decodes"]) == (e["name"] != "prefill") for e in steps)
    assert all(bool(e["args"]["prompts"]) == (e["name"] != "decode") for e in steps)
    assert sum(e["args"]["prompt_tokens"] for e in steps) == result["prompt_tokens_computed"]
    decoded = {e["id"] for e in events if e["ph"] == "b" and e["name"] == "decode"}
    assert decoded == {str(request.id) for request in run.requests if request.output > 1}


def test_timeline_changes_no_metric_and_is_reproducible(tmp_path: Path) -> None:
    words = ("run", "-X", 5, "-T", 10, "--set", "policy.decode_batch=4")
    assert sweeps.sim(*words, "-o", tmp_path / "plain") == 0
    for name in ("one", "two"):
        assert sweeps.sim(*words, "-o", tmp_path / name, "--timeline", tmp_path / f"{name}.json.gz") == 0
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()
    instants = []
    for name in ("plain", "one"):
        with open(tmp_path / name / "requests.csv", newline="") as file:
            instants.append([(row["arrival"], row["first_token"], row["finish"]) for row in csv.DictReader(file)])
    assert instants[0] == instants[1]


def test_failed_run_leaves_no_incomplete_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    with pytest.raises(RuntimeError), Timeline(path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_queue_log_keeps_a_bounded_number_of_points_over_the_whole_run() -> None:
    log = QueueLog(50)
    run = simulate(scenario_from(sweeps.base(workload=sweeps.workload(200))), None, [log])
    assert 50 <= len(log.times) <= 100 and len(log.times) == len(log.queues)
    assert log.times == sorted(log.times) and log.times[-1] >= 0.95 * run.end
    assert max(queue.running for queue in log.queues) == 1


def shared_prompts(**policy: Any) -> dict[str, Any]:
    """Return a scenario whose prompts share prefixes, with few blocks, so that cached ones are evicted."""
    prefixes = {"count": 4, "tokens": 160, "share": 0.8}
    return sweeps.base(
        policy={"name": "vllm-v1", **policy}, engine={"num_blocks": 80},
        workload={**sweeps.workload(80, 4.0), "prefixes": prefixes},
    )  # fmt: skip


def test_counters_of_the_prefix_cache_end_at_the_metrics_and_blocks_add_up(tmp_path: Path) -> None:
    events, run = run_with_timeline(tmp_path / "t.json", shared_prompts())
    result = run.result()
    counters: dict[str, Events] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"])
    assert result["prefix_cache_hits"] > 0 and result["prefix_cache_evictions"] > 0
    ends = {"queries": result["prefix_cache_queries"], "hits": result["prefix_cache_hits"]}
    assert counters["prefix cache (tokens)"][-1] == ends
    assert counters["prefix cache hits so far (%)"][-1] == {"hits": pytest.approx(100 * result["prefix_hit_rate"])}
    assert counters["evicted blocks"][-1] == {"evicted": result["prefix_cache_evictions"]}
    total = run.server.pool.total
    assert all(sum(args.values()) == total and min(args.values()) >= 0 for args in counters["blocks"])
    cached = sum(free.length for free in run.server.prefix_cache.free_list.runs() if free.hashed)  # type: ignore[union-attr]
    assert counters["blocks"][-1]["cached"] == cached > 0
    slices = {e["id"]: e["args"].get("cached", 0) for e in events if e["ph"] == "e" and "outcome" in e["args"]}
    assert slices == {str(request.id): request.cached_tokens for request in run.requests}


def test_a_run_without_a_prefix_cache_has_no_counters_of_it(tmp_path: Path) -> None:
    events, _ = run_with_timeline(tmp_path / "t.json", shared_prompts(enable_prefix_caching=False))
    names = {event["name"] for event in events if event["ph"] == "C"}
    assert names == {"queues", "blocks"}
