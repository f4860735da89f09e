"""Recordings of real engines, reproduced with `sim run --decisions` from a trace and a scenario."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.cli import main
from servesim.core import field_values
from servesim.policies import POLICIES
from servesim.traces.samplings import SAMPLING_COLUMNS, values_of

from ..policies import test_engines_other, test_engines_sglang, test_engines_vllm  # noqa: F401  they map engines to policies
from ..policies.recordings import ENGINES, FOLDER, Recording, as_queued, empty_step, load

NAMES = sorted(path.relative_to(FOLDER).as_posix().removesuffix(".json.gz") for path in FOLDER.glob("**/*.json.gz"))


def scenario_of(recording: Recording) -> dict[str, Any]:
    """Return the scenario that must reproduce a recording; one tick of it is one second."""
    policy = ENGINES[recording.meta["engine"]](recording.meta)
    name = next(name for name, kind in POLICIES.items() if type(policy) is kind)
    knobs, cost = recording.knobs, recording.meta["cost"]
    engine = {
        "num_blocks": knobs.get("num_blocks", knobs.get("max_total_token_num", 0)) + policy.traits.reserved_blocks,
        "block_size": knobs.get("block_size", 1),
        "host_blocks": knobs.get("num_cpu_blocks", 0),
        "max_model_len": knobs.get("max_model_len"),
        "empty_step": empty_step(policy),
    }
    profile = {
        "base": cost["c0"], "prefill_token": cost["per_prefill_token"], "decode_live": cost["per_decode_seq"],
        "swap_block": cost["per_swap_block"],
    }  # fmt: skip
    return {
        "trace": "trace.jsonl",
        "policy": {"name": name, **field_values(policy)},
        "engine": engine,
        "profile": profile,
    }


def write(recording: Recording, folder: Path) -> None:
    rows = []
    for id, arrival, prompt, output, priority in sorted(recording.requests, key=lambda request: request[1]):
        row = {"id": id, "arrival_s": arrival, "prompt_tokens": prompt, "output_tokens": output, "priority": priority}
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
    dies = bool(recording.meta.get("error")) and bool(recording.groups)
    assert main(["run", "scenario.yaml", "-o", "out", "--decisions", "log.jsonl"]) == (1 if dies else 0)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps, engine = recording.steps, recording.meta["engine"]
    if engine.startswith(("deepspeed", "sglang")):  # rounds without a model call; compare only the calls
        steps = [step for step in steps if step["sched"]]
        log = [step for step in log if step["chunks"]]
    assert len(log) == len(steps)
    for ours, theirs in zip(log, steps, strict=True):
        assert ours["t"] == theirs["t"]
        if theirs.get("ret") is not None:
            assert (ours.get("start", ours["t"]), ours["t_end"]) == (theirs["start"], theirs["ret"])
            assert ours["finished"] == theirs.get("finished", [])
        prompts = set(ours["prompts"])
        if engine.startswith("lightllm"):  # it counts a chunk of one prompt token as a decode
            prompts = {id for id, n in ours["chunks"] if n > 1}
        assert [[id, n, "P" if id in prompts else "D"] for id, n in ours["chunks"]] == theirs["sched"]
        swapped_in = [id for id in ours["running"] if id in ours["swapped_in"]] if recording.groups else None
        assert (swapped_in or ours["swapped_in"]) == theirs.get("swap_in", [])
        if recording.groups:
            ours["preempted"] = as_queued(ours["preempted"], ours["waiting"])
            absent = {"sequences": [1] * len(ours["chunks"]), "copies": 0, "swap_blocks": 0}  # before the first group
            assert {name: ours.get(name, absent[name]) for name in absent} == {name: theirs[name] for name in absent}
            assert (ours["host_free"], bool(ours["preempted"])) == (theirs["free_cpu"], "preempted" in theirs)
        if "free_gpu" in theirs or "free_after" in theirs:
            assert ours["free"] == theirs.get("free_gpu", theirs.get("free_after"))
        if "cached" in theirs:
            hits_only = engine.startswith("sglang")
            assert [row for row in ours["cached"] if row[1] or not hits_only] == theirs["cached"]
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
        assert [float(row[name]) if row[name] else None for name in ("first_token", "finish")] == [first, end]
        assert int(row["preemptions"]) == preemptions or engine.startswith(
            "deepspeed"
        )  # its recordings count no preemptions
