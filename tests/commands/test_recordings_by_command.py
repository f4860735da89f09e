"""Recordings of real engines, reproduced with `sim run --decisions` from a trace and a scenario."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.cli import main
from servesim.config.registry import SPECULATIVE
from servesim.core import field_values
from servesim.engine.rules import rules_of
from servesim.policies import POLICIES
from servesim.traces.samplings import SAMPLING_COLUMNS, values_of

from ..policies import (  # noqa: F401  they map engines to policies
    test_engines_ascend,
    test_engines_mindie,
    test_engines_other,
    test_engines_sglang,
    test_engines_vllm,
)
from ..policies.recordings import ENGINES, Recording, as_queued, empty_step, load

# One recording of each engine: tests/policies compares all of them without the command.
NAMES = (
    "kv_pressure_split_optim__lightllm", "kv_pressure__mii", "chunked_kv_pressure__sarathi-sarathi",
    "burst__sarathi-faster_transformer", "kv_pressure__v0.4.2", "groups/parallel_mixed_swap__v0.6.1",
    "groups/parallel_readmission_dies__v0.6.1", "v1_reserve_off__v1-0.32.0", "prefix/sessions_pressure__v1-0.32.0",
    "prefix/async_prefix_preemption__v1-0.32.0", "sglang/chunked_pressure__sglang-0.5.18",
    "ascend/splitfuse_pressure__mindie-3.0.0", "ascend/recompute_never_readmitted__mindie-3.0.0",
    "ascend/no_chunk_priority_pressure__vllm-mindspore-0.5.1", "ascend/chunked__vllm-ascend-0.11.0",
    "ascend/balance_skewed__vllm-ascend-0.25.1rc1", "ascend/batch_jobs_kv_pressure__vllm-ascend-0.25.1rc1",
    "ascend/dynamic_batch_kv_pressure__vllm-ascend-0.13.0", "ascend/recompute_consumer__vllm-ascend-0.25.1rc1",
    "ascend/profiling_chunk_kv_pressure__vllm-ascend-0.25.1rc1",
    "ascend/short_first_kv_pressure__vllm-ascend-0.25.1rc1",
)  # fmt: skip


def scenario_of(recording: Recording) -> dict[str, Any]:
    """Return the scenario that must reproduce a recording."""
    policy = ENGINES[recording.meta["engine"]](recording.meta)
    name = next(name for name, kind in POLICIES.items() if type(policy) is kind)
    knobs = recording.knobs
    engine = {
        "num_blocks": knobs.get("num_blocks", knobs.get("max_total_token_num", 0)) + rules_of(policy).reserved_blocks,
        "block_size": knobs.get("block_size", 1),
        "host_blocks": knobs.get("num_cpu_blocks", 0),
        "max_model_len": knobs.get("max_model_len"),
        "empty_step": empty_step(policy),
        "data_parallel_size": knobs.get("ranks", 1),
    }
    return {
        "trace": "trace.jsonl",
        "policy": {"name": name, **{k: v for k, v in field_values(policy).items() if k not in SPECULATIVE}},
        "engine": engine,
        "profile": recording.cost,
    }


def write(recording: Recording, folder: Path) -> None:
    rows = []
    for id, arrival, prompt, output, priority in sorted(recording.requests, key=lambda request: request[1]):
        arrival *= recording.tick
        row = {"id": id, "arrival_s": arrival, "prompt_tokens": prompt, "output_tokens": output, "priority": priority}
        if recording.rank:
            row["session_id"] = f"rank {recording.rank[id]}"
        if recording.max_tokens:
            row["limit_tokens"] = recording.max_tokens.get(id, output)
        if recording.content:
            row |= {"content": recording.pieces(id), "answer": recording.answer(id)}
        if (sampling := recording.sampling(id)) is not None:
            row |= {name: value for name, value in zip(SAMPLING_COLUMNS, values_of(sampling)) if value is not None}
        rows.append(json.dumps(row) + "\n")
    (folder / "trace.jsonl").write_text("".join(rows))
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario_of(recording)))


@pytest.mark.parametrize("name", NAMES)
def test_command_reproduces_a_recording(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = load(name)
    monkeypatch.chdir(tmp_path)
    write(recording, tmp_path)
    steps, engine, error = recording.steps, recording.meta["engine"], recording.meta.get("error")
    dies = bool(error) and (bool(recording.groups) or error == "stuck" or engine.startswith("mindie"))
    assert main(["run", "scenario.yaml", "-o", "out", "--decisions", "log.jsonl"]) == (1 if dies else 0)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    if error == "stuck: no progress":  # the recording ends after some of the empty rounds
        del log[len(steps) :]
    if error == "stuck":  # the last entry says that nothing runs any more
        assert steps.pop()["t"] == log[-1]["t_end"]
    if engine.startswith(("deepspeed", "sglang")):  # rounds without a model call; compare only the calls
        steps = [step for step in steps if step["sched"]]
        log = [step for step in log if step["chunks"]]
    if recording.rank:  # our first rank is the one with the first request
        log.sort(key=lambda step: (step["t"], recording.rank[step["running"][0]]))
    assert len(log) == len(steps)
    for ours, theirs in zip(log, steps, strict=True):
        assert recording.ticks(ours["t"]) == theirs["t"]
        if "queues" in theirs:
            assert [len(ours[name]) for name in ("waiting", "running", "swapped")] == theirs["queues"]
            if "start" in theirs:
                assert recording.ticks(ours.get("start", ours["t"])) == theirs["start"]
            assert ours["host_free"] == theirs["free_cpu"]
        if theirs.get("ret") is not None:
            assert (ours.get("start", ours["t"]), ours["t_end"]) == (theirs["start"], theirs["ret"])
            assert ours["finished"] == theirs.get("finished", [])
        prompts = set(ours["prompts"])
        if engine.startswith("lightllm"):  # it counts a chunk of one prompt token as a decode
            prompts = {id for id, n in ours["chunks"] if n > 1}
        assert [[id, n, "P" if id in prompts else "D"] for id, n in ours["chunks"]] == theirs["sched"]
        in_order = recording.groups or engine.startswith("mindie")
        swapped_in = [id for id in ours["running"] if id in ours["swapped_in"]] if in_order else None
        assert (swapped_in or ours["swapped_in"]) == theirs.get("swap_in", [])
        if recording.groups:
            ours["preempted"] = as_queued(ours["preempted"], ours["waiting"])
            absent = {"sequences": [1] * len(ours["chunks"]), "copies": 0, "swap_blocks": 0}  # before the first group
            assert {name: ours.get(name, absent[name]) for name in absent} == {name: theirs[name] for name in absent}
            assert (ours["host_free"], bool(ours["preempted"])) == (theirs["free_cpu"], "preempted" in theirs)
        if "ignored" in theirs or "recomputed" in theirs:
            assert ours["rejected"] == theirs.get("ignored", theirs.get("recomputed"))
        if "free_gpu" in theirs or "free_after" in theirs:
            assert ours["free"] == theirs.get("free_gpu", theirs.get("free_after"))
        if "cached" in theirs:
            assert ours["cached"] == theirs["cached"]
        if "hits" in theirs:
            assert [row for row in ours["cached"] if row[1]] == theirs["hits"]
        if "evictable" in theirs:
            assert ours["evictable"] * recording.knobs["block_size"] == theirs["evictable"]
        if "preempted" in theirs and recording.knobs.get("policy") != "priority":
            with_mode = bool(theirs["preempted"]) and isinstance(theirs["preempted"][0], list)
            assert [gone if with_mode else gone[0] for gone in ours["preempted"]] == theirs["preempted"]
    with (tmp_path / "out" / "requests.csv").open() as file:
        table = {row["id"]: row for row in csv.DictReader(file)}
    for id, first, end, preemptions, *cached in recording.per_request:
        row = table[id]
        assert [int(row["cached_tokens"])] == cached or not cached
        ended = row["finish"] if row["outcome"] == "finished" else ""
        times = [float(time) if time else None for time in (row["first_token"], ended)]
        assert [recording.ticks(time) for time in times] == [first, end]
        assert int(row["preemptions"]) == preemptions or engine.startswith(
            "deepspeed"
        )  # its recordings count no preemptions
