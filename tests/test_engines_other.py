"""Sarathi-Serve, DeepSpeed-MII and LightLLM: our policies decide as the recorded engines did."""

from __future__ import annotations

from typing import Any

import pytest
from servesim.core import Policy
from servesim.policies import POLICIES

from .recordings import ENGINES, compare, load, names, play


def sarathi(meta: dict[str, Any]) -> Policy:
    """Return the policy for one of the schedulers that Sarathi-Serve ships."""
    knobs = meta["knobs"]
    seqs, chunk = knobs["max_num_seqs"], knobs["max_num_batched_tokens"]
    if meta["policy"] == "faster_transformer":
        return POLICIES["static"](max_num_seqs=seqs)
    if meta["policy"] == "orca":
        return POLICIES["orca"](max_num_seqs=seqs, reserve="model")
    name = "sarathi" if meta["policy"] == "sarathi" else "sarathi-alternating"
    return POLICIES[name](max_num_seqs=seqs, chunk_size=chunk)


def mii(meta: dict[str, Any]) -> Policy:
    """Return MII's policy."""
    knobs = meta["knobs"]
    return POLICIES["splitfuse"](
        max_ragged_batch_size=knobs["max_num_batched_tokens"], max_ragged_sequence_count=knobs["max_num_seqs"]
    )


def lightllm(meta: dict[str, Any]) -> Policy:
    """Return LightLLM's policy."""
    knobs = {key: value for key, value in meta["knobs"].items() if key not in ("max_total_token_num", "splitfuse")}
    split = meta["knobs"].get("splitfuse")
    if split:
        knobs.update(splitfuse_mode=True, splitfuse_block_size=split)
    return POLICIES["lightllm"](**knobs)


ENGINES["sarathi-serve-scheduler-only"] = sarathi
ENGINES["deepspeed-mii-ragged-batching"] = mii
ENGINES["lightllm-router"] = lightllm


@pytest.mark.parametrize("name", names("sarathi"))
def test_every_decision_of_sarathi_is_the_recorded_one(name: str) -> None:
    recording = load(name)
    compare(recording, play(recording))


@pytest.mark.parametrize("name", names("lightllm"))
def test_every_decision_of_lightllm_is_the_recorded_one(name: str) -> None:
    recording = load(name)
    played = play(recording)
    for row in played.rows:  # LightLLM runs, and calls, the last token of a prompt by itself a decode
        row["sched"] = [[id, tokens, "D" if tokens == 1 else "P"] for id, tokens, _ in row["sched"]]
    compare(recording, played)


@pytest.mark.parametrize("name", names("deepspeed"))
def test_every_pass_of_mii_is_the_recorded_one(name: str) -> None:
    recording = load(name)
    played = play(recording)
    assert [passed(row) for row in turns(played.rows)] == [passed(step) for step in turns(recording.steps)]
    for id, first, end, _ in recording.per_request:
        request = played.requests[id]
        assert (request.first_token, request.finish) == (first, end), id


def turns(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what MII's loop did, without the rounds in which it only looked, and the flush after the last end."""
    ran = [step for step in steps if step["sched"] or step.get("flushed") or step.get("preempted")]
    return ran if ran[-1]["sched"] else ran[:-1]


def passed(step: dict[str, Any]) -> tuple[Any, ...]:
    """Return a pass as both sides tell it: an eviction is a round that flushes and runs nothing."""
    evicted = [id for id, _ in step.get("preempted", ())]
    return step["t"], step["sched"], {*evicted, *step.get("flushed", ())}, step["free_after"]
