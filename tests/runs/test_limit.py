"""What limits a run: constructed cases with step times for which the answer, and the share of the time, follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import ClientRequest
from servesim.runs.limit import Limit, limit_of
from servesim.runs.simulate import Run, simulate
from servesim.runs.text import show_run
from servesim.traces.trace import Trace

STEP = 0.01  # seconds of every step, whatever it computes: larger steps are better
EQUAL_STEPS = {"base": STEP}
AT_ONCE = [0.0] * 8
APART = [float(k) for k in range(20)]  # a request takes less than a second


def run_of(
    policy: dict[str, Any], arrivals: Sequence[float], prompt: int = 16, output: int = 10,
    profile: dict[str, Any] = EQUAL_STEPS, hold: bool = True, **engine: Any,
) -> Run:  # fmt: skip
    requests = [ClientRequest(k, time, prompt, output) for k, time in enumerate(arrivals)]
    tree = {"policy": policy, "profile": profile, "engine": {"num_blocks": 1000, "block_size": 16, **engine}}
    return simulate(scenario_from(tree), Trace(requests, "made", "made"), hold=hold)


def limit_named(run: Run, kind: str, setting: str = "") -> Limit:
    limit = limit_of(run)
    assert limit.kind == run.result()["limit"] == kind, limit.text
    assert setting in limit.text
    assert limit.text in show_run(run)
    return limit


VLLM = {"name": "vllm-v1", "async_scheduling": False}


SGLANG = {"name": "sglang", "disable_overlap_schedule": True, "disable_radix_cache": True}
MINDIE = {"name": "mindie", "max_queue_delay_microseconds": 1}
LLM_SERVING = {"name": "llm-serving", "decode_batch": 8}


@pytest.mark.parametrize(
    ("policy", "slots", "share"),
    [(VLLM, "max_num_seqs", 3 / 4), (SGLANG, "max_running_requests", 3 / 4), (LLM_SERVING, "decode_batch", 3 / 4),
     (MINDIE, "max_batch_size", 36 / 37)],
    ids=lambda value: str(value["name"]) if isinstance(value, dict) else "",
)  # fmt: skip
def test_slots(policy: dict[str, Any], slots: str, share: float) -> None:
    """Pairs of requests run one after another; in all but the last pair, others wait for a slot.

    With MindIE all requests start, and pairs decode in turns: more than two run until the last of 37 rounds.
    """
    run = run_of({**policy, slots: 2}, AT_ONCE)
    limit = limit_named(run, "slots", f"policy.{slots} (2)")
    assert not limit.saturated
    assert run.result()["waiting_slots"] == pytest.approx(share, abs=0.02)
    assert run.result()["waiting_blocks"] == 0


@pytest.mark.parametrize(
    "policy",
    [
        {**VLLM, "max_num_batched_tokens": 112}, {**SGLANG, "chunked_prefill_size": 112},
        {**MINDIE, "max_prefill_batch_size": 1}, {**LLM_SERVING, "prefill_batch": 1},
    ],
    ids=lambda policy: str(policy["name"]),
)  # fmt: skip
def test_budget(policy: dict[str, Any]) -> None:
    """Eight prompts, one per step, and no decodes: in seven of eight steps a prompt waits for the next step."""
    run = run_of(policy, AT_ONCE, prompt=112, output=1)
    name = list(policy)[-1]
    limit_named(run, "budget", f"policy.{name} ({policy[name]})")
    assert run.result()["waiting_budget"] == pytest.approx(7 / 8, abs=0.02)
    assert run.result()["waiting_slots"] == 0


@pytest.mark.parametrize(
    "policy",
    [VLLM, SGLANG, LLM_SERVING, MINDIE],
    ids=lambda policy: str(policy["name"]),
)
def test_blocks(policy: dict[str, Any]) -> None:
    """There are blocks for two requests of 13 blocks. So pairs run one after another, but slots are free."""
    run = run_of(policy, AT_ONCE, prompt=160, output=40, num_blocks=29)
    limit_named(run, "blocks", "engine.num_blocks (29)")
    if policy is VLLM:
        assert run.result()["waiting_blocks"] == pytest.approx(3 / 4, abs=0.02)
    assert run.result()["waiting_slots"] == 0


def test_the_device_limits_a_run_without_a_queue_if_tokens_take_long() -> None:
    """All requests decode together, and a step takes a time per row: eight times as long as one of a request alone."""
    run = run_of(VLLM, AT_ONCE, profile={"decode_row": 0.001, "prefill_token": 1e-5})
    limit_named(run, "compute", "a token takes 8.0 times as long")
    assert run.result()["waiting_slots"] == run.result()["waiting_budget"] == 0


@pytest.mark.parametrize("setting", ["max_num_seqs", "max_num_batched_tokens"])
def test_the_device_limits_a_run_if_larger_steps_take_longer_in_proportion(setting: str) -> None:
    slots = setting == "max_num_seqs"
    policy = {**VLLM, setting: 2 if slots else 112}
    costs = {"decode_row": 0.001, "prefill_token": 1e-5 if slots else 1e-3}
    run = run_of(policy, AT_ONCE, prompt=112, output=100 if slots else 1, profile=costs)
    assert run.result()["waiting_slots" if slots else "waiting_budget"] > 0.7
    limit_named(run, "compute", "larger steps would take longer in proportion")


def test_the_front_end() -> None:
    run = run_of(VLLM, APART, front_end={"seconds": 0.2})
    limit_named(run, "front end", "200 of 210 ms of the mean TTFT")
    assert limit_named(run_of(VLLM, APART, front_end={"seconds": 0.005}), "none")


@pytest.mark.parametrize("name", ["vllm-v1", "sglang", "mindie", "llm-serving"])
def test_no_limit(name: str) -> None:
    run = run_of({"name": name}, APART)
    assert not limit_named(run, "none", "Nothing limits this run").saturated
    assert run.result()["waiting_slots"] == run.result()["waiting_budget"] == run.result()["waiting_blocks"] == 0


@pytest.mark.parametrize("policy", [{**VLLM, "max_num_seqs": 2}, {"name": "llm-serving", "decode_batch": 2}])
def test_saturated(policy: dict[str, Any]) -> None:
    """Two requests take 10 steps, so the server serves 20 requests per second; 50 arrive."""
    run = run_of(policy, [k / 50 for k in range(200)])
    limit = limit_named(run, "slots", "More load than it can serve")
    assert limit.saturated


def test_a_request_that_waits_rarely_is_no_limit() -> None:
    """Two of twenty requests arrive together, and there is one slot: one of them waits 0.1 of 19 seconds."""
    run = run_of({**VLLM, "max_num_seqs": 1}, [0.0, *APART[:-1]])
    assert run.result()["waiting_slots"] == pytest.approx(0.1 / run.end, rel=0.1)
    limit_named(run, "none")


def test_ranks_in_lock_step_add_up() -> None:
    policy = {**VLLM, "max_num_seqs": 2}
    alone, together = run_of(policy, AT_ONCE), run_of(policy, AT_ONCE * 2, data_parallel_size=2)
    assert together.result()["waiting_slots"] == pytest.approx(alone.result()["waiting_slots"])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_seconds_have_the_same_bits_without_hold(asynchronous: bool) -> None:
    policy = {"name": "vllm-v1", "max_num_seqs": 3, "async_scheduling": asynchronous}
    arrivals = [k / 7 for k in range(40)]
    runs = [run_of(policy, arrivals, 50, 60, num_blocks=16, hold=fast) for fast in (True, False)]
    first, second = (run.limit_metrics for run in runs)
    assert first == second
    assert first["waiting_slots"] > 0 and first["waiting_blocks"] > 0
