"""MindIE-LLM: the policy reproduces every recorded round of 3.0.0."""

from __future__ import annotations

from typing import Any

import pytest
from servesim.core import Policy
from servesim.policies import POLICIES
from servesim.policies.mindie.round import STAGE_POLICIES

from .recordings import ENGINES, compare, load, recording_names, reproduce

FIELDS = {  # names of config.json and of the recordings
    "maxBatchSize": "max_batch_size", "maxPrefillBatchSize": "max_prefill_batch_size",
    "maxPrefillTokens": "max_prefill_tokens", "prefillTimeMsPerReq": "prefill_time_ms_per_req",
    "decodeTimeMsPerReq": "decode_time_ms_per_req", "maxPreemptCount": "max_preempt_count",
    "maxQueueDelayMicroseconds": "max_queue_delay_microseconds", "maxFirstTokenWaitTime": "max_first_token_wait_time",
    "enableChunkedPrefill": "split_fuse", "prefillChunkSize": "prefill_chunk_size",
    "longPrefillTokenThreshold": "long_prefill_token_threshold", "maxLongPartialPrefills": "max_long_partial_prefills",
    "prefillExpectedTime": "prefill_expected_time", "decodeExpectedTime": "decode_expected_time",
    "dynamicBatchSizeEnable": "dynamic_batch_size", "activateAsyncInference": "async_scheduling",
}  # fmt: skip


def mindie(meta: dict[str, Any]) -> Policy:
    """Return the policy for MindIE-LLM."""
    knobs = meta["knobs"]
    fields = {ours: knobs[name] for name, ours in FIELDS.items() if name in knobs}
    number = 1 if knobs.get("supportSelectBatch") else knobs.get("stageSelectPolicy", 0)
    return POLICIES["mindie"](stage_policy=STAGE_POLICIES[number], **fields)


ENGINES["mindie-llm-scheduler-only"] = mindie

NAMES = recording_names("mindie", folder="ascend")


@pytest.mark.parametrize("name", NAMES)
def test_every_round_of_mindie_is_reproduced(name: str) -> None:
    recording = load(name)
    played = reproduce(recording)
    error = recording.meta["error"]
    if error is None:
        assert played.stuck is None
    elif error.startswith("exception: "):  # the engine thread dies of it, with this text
        assert error.removeprefix("exception: ") in str(played.stuck)
    else:  # the recording ends after a number of empty rounds
        assert error.removeprefix("stuck: ") in str(played.stuck)
        rest = played.rows[len(recording.steps) :]
        assert rest and not any(row["sched"] or row["preempted"] or row["swap_in"] for row in rest)
        del played.rows[len(recording.steps) :]
    compare(recording, played)
