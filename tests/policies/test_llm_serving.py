"""llm-serving: every recorded decision of the real scheduler, and the settings that its users changed."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from servesim.core import Request, Stuck
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.llm_serving import LLMServing
from servesim.runs.decision_log import DecisionLog

from ..conftest import RECORDINGS

CASES = sorted((RECORDINGS / "llm-serving").glob("*.json"))
VECTORS = RECORDINGS / "llm-serving" / "vectors.jsonl.gz"


def play(
    specs: list[dict[str, Any]],
    policy: LLMServing,
    cost: dict[str, float],
    blocks: int = 64,
    block_size: int = 16,
    lag: int = 1,
    max_generate_length: int | None = None,
    **limits: Any,
) -> tuple[list[Request], list[dict[str, Any]], str | None]:
    """Run the requests of a recording; return them, the decision log, and the error of a livelock."""
    requests = [
        Request(
            q["id"], q["arrival"], q["prompt_len"], min(q.get("eos_at") or 10**9, q["max_new_tokens"]),
            limit=q["max_new_tokens"], fails_at_token=q.get("fail_at"),
        )
        for q in specs
    ]  # fmt: skip
    server = Server(policy, blocks, block_size, **limits)
    server.limits.change(max_generate_length, None)
    file = io.StringIO()
    clock = SimulatedClock(LinearCost(prefill=cost["prefill"], decode_step=cost["decode"]))
    loop = Loop(server, Inbox(requests, lag), clock, (DecisionLog(file),), check=True)
    stuck = None
    try:
        loop.run()
    except Stuck as error:
        stuck = str(error)
    steps = [json.loads(line) for line in file.getvalue().splitlines()]
    return requests, [step for step in steps if step["kind"] != "idle" or step["preempted"] or step["admitted"]], stuck


def make_policy(config: dict[str, Any]) -> LLMServing:
    if config.get("page_attention", True):
        static = config.get("strategy") == "static"
        return LLMServing(decode_batch=config["decode_batch"][0], strategy="static-paged" if static else "paged")
    return LLMServing(
        decode_batch=config["decode_batch"][0], prefill_batch=config["prefill_batch"][0], strategy=config["strategy"]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_a_named_case_is_reproduced_step_by_step(case: Path) -> None:
    check_reproduced(json.loads(case.read_text()))


def check_reproduced(recorded: dict[str, Any]) -> None:
    """Play a recording and assert that every step is equal."""
    config = recorded["config"]
    paged = config.get("page_attention", True)
    requests, steps, stuck = play(
        recorded["requests"], make_policy(config), recorded["cost"], config.get("num_blocks", 64),
        config.get("block_size", 16), max_model_len=(config.get("seq_length") or [4096])[-1],
        max_generate_length=config.get("max_generate_length"),
    )  # fmt: skip
    expected_steps = [s for s in recorded["steps"] if s["kind"] != "idle" or s["swapped_out"] or s["inserted"]]
    assert len(steps) == len(expected_steps)
    for actual, expected in zip(steps, expected_steps, strict=True):
        assert (actual["t"], actual["t_end"], actual["kind"]) == (expected["t"], expected["t_end"], expected["kind"])
        assert actual["arrived"] == expected["admitted"] or actual["kind"] == "idle"
        assert actual["waiting"] == expected["waiting"]
        preempted = [(id, slot) for (id, _), slot in zip(actual["preempted"], actual["preempted_slots"], strict=True)]
        assert preempted == [(victim["id"], victim["slot"]) for victim in expected["swapped_out"]]
        if paged:
            assert actual["free_after"] == expected["free_blocks"]
            admitted = list(zip(actual["admitted"], actual["admitted_slots"], strict=True))
            assert admitted == [(new["id"], new["slot"]) for new in expected["inserted"]]
        else:
            assert actual["free"] is actual["free_after"] is None  # no block pool
        if expected["kind"] == "prefill":
            rows = [row["id"] for row in expected["prefill"]]
            assert actual["prompts"] == list(dict.fromkeys(rows))[: len(actual["prompts"])]
            assert len(actual["prompts"]) + actual.get("padding_rows", 0) == len(rows)
        if expected["kind"] == "decode":
            slots = dict(zip(actual["running"], actual["slots"], strict=True))
            assert [slots[id] for id, _ in actual["chunks"]] == expected["valid"]
    assert {r.id: r.finish for r in requests if r.outcome in ("finished", "failed", "refused")} == recorded[
        "finished_at"
    ]
    assert (stuck is not None) == (recorded["error"] is not None)


def vectors() -> list[dict[str, Any]]:
    with gzip.open(VECTORS, "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("recorded", vectors(), ids=lambda recorded: str(recorded["seed"]))
def test_a_random_recording_is_reproduced_step_by_step(recorded: dict[str, Any]) -> None:
    policy = LLMServing(decode_batch=recorded["decode_batch_size"])
    requests, steps, stuck = play(
        recorded["requests"], policy, recorded["cost"], recorded["num_blocks"], recorded["block_size"],
        max_model_len=recorded["seq_length"],
    )  # fmt: skip
    expected_steps = [s for s in recorded["steps"] if s["kind"] != "idle" or s["swapped"] or s["inserted"]]
    assert len(steps) == len(expected_steps)
    for actual, expected in zip(steps, expected_steps, strict=True):
        assert actual["t"] == pytest.approx(expected["t"], rel=1e-12)
        assert (actual["kind"], actual["free_after"], actual["waiting"]) == (
            expected["kind"],
            expected["free"],
            expected["waiting"],
        )
        preempted = [[id, slot] for (id, _), slot in zip(actual["preempted"], actual["preempted_slots"], strict=True)]
        assert preempted == expected["swapped"]
        assert [list(new) for new in zip(actual["admitted"], actual["admitted_slots"], strict=True)] == expected[
            "inserted"
        ]
        if expected["kind"] == "prefill":
            assert actual["prompts"] == [expected["what"]]
        if expected["kind"] == "decode":
            slots = dict(zip(actual["running"], actual["slots"], strict=True))
            assert [slots[id] for id, _ in actual["chunks"]] == expected["what"]
    assert (stuck is not None) == (recorded["error"] is not None)
    finished = {r.id: r.finish for r in requests if r.outcome in ("finished", "refused")}
    assert finished == pytest.approx(recorded["finished_at"], rel=1e-12)


ONE_EACH = {"prefill": 1.0, "decode": 1.0}


def spec(id: str, arrival: float, prompt: int = 4, output: int = 3) -> dict[str, Any]:
    return {"id": id, "arrival": arrival, "prompt_len": prompt, "max_new_tokens": output}


def run_steps(
    specs: list[dict[str, Any]], blocks: int = 64, block_size: int = 16, **fields: Any
) -> list[tuple[Any, ...]]:
    steps = play(specs, LLMServing(**fields), ONE_EACH, blocks, block_size)[1]
    return [(step["t"], step["kind"], "".join(str(id) for id, _ in step["chunks"])) for step in steps]


def test_one_prefill_runs_up_to_prefill_batch_prompts() -> None:
    specs = [spec("a", 0), spec("b", 0), spec("c", 0)]
    assert run_steps(specs, decode_batch=3, prefill_batch=2)[:3] == [
        (0.0, "prefill", "ab"), (1.0, "prefill", "c"), (2.0, "decode", "abc"),
    ]  # fmt: skip


def test_the_delay_factor_delays_admission_until_a_request_is_old_enough() -> None:
    """The prefill of a takes 1 s. b arrives at 1.5 s; with factor 2 it must wait more than 2 s, until after 3.5 s."""
    specs = [spec("a", 0, output=8), spec("b", 1.5, output=1)]
    starts = {}
    for variant in ("queue", "request"):
        steps = run_steps(specs, decode_batch=2, delay_factor=2.0, delay_variant=variant)
        starts[variant] = [step for step in steps if "b" in step[2]]
    assert starts["queue"][0] == (4.0, "prefill", "b")
    assert starts["request"][0] == (4.0, "prefill", "b")


def test_the_delay_factor_alone_has_an_effect() -> None:
    specs = [spec("a", 0, output=8), spec("b", 1.5, output=1)]
    assert (4.0, "prefill", "b") in run_steps(specs, decode_batch=2, delay_factor=2.0)
    assert (2.0, "prefill", "b") in run_steps(specs, decode_batch=2, delay_variant="none")


@pytest.mark.parametrize("variant", ["queue", "request", "contest"])
def test_a_request_that_has_waited_exactly_the_delay_waits_one_more_step(variant: str) -> None:
    """The prefill of a takes 1 s, so with factor 2 the delay is 2 s. b arrives at 1 s: at 3 s it has waited 2 s."""
    specs = [spec("a", 0, output=8), spec("b", 1, output=1)]
    steps = run_steps(specs, decode_batch=2, delay_factor=2.0, delay_variant=variant)
    assert next(step for step in steps if "b" in step[2]) == (4.0, "prefill", "b")


def test_delay_per_queue_and_per_request_differ_for_the_second_request() -> None:
    """At 4 s, b (arrived at 1.5 s) is old enough, c (3.5 s) is not; the delay per queue admits both."""
    specs = [spec("a", 0, output=9), spec("b", 1.5, output=1), spec("c", 3.5, output=1)]
    whole_queue = run_steps(specs, decode_batch=3, delay_factor=2.0, delay_variant="queue", prefill_batch=2)
    per_request = run_steps(specs, decode_batch=3, delay_factor=2.0, delay_variant="request", prefill_batch=2)
    assert (4.0, "prefill", "bc") in whole_queue
    assert (4.0, "prefill", "b") in per_request


def test_the_contest_delay_makes_a_single_request_wait_after_an_idle_time() -> None:
    """It counts from the last admission: after 34 s idle, factor 0.5 waits 17 s although every slot is free."""
    specs = [spec("a", 0, output=1), spec("b", 34, output=1)]
    steps = run_steps(specs, decode_batch=2, delay_factor=0.5, delay_variant="contest")
    assert steps[1][1:] == ("prefill", "b")
    assert steps[1][0] == pytest.approx(51.0)
    fixed = run_steps(specs, decode_batch=2, delay_factor=0.5, delay_variant="contest", fix_delay_bugs=True)
    assert fixed[1] == (34.0, "prefill", "b")


def test_the_contest_delay_as_reported_crashes_on_an_empty_queue() -> None:
    fields = {"decode_batch": 2, "delay_factor": 0.5, "delay_variant": "contest-as-reported"}
    stuck = play([spec("a", 0)], LLMServing(**fields), ONE_EACH)[2]
    assert stuck is not None
    assert "empty waiting queue" in stuck
    assert play([spec("a", 0)], LLMServing(**fields, fix_delay_bugs=True), ONE_EACH)[2] is None


def test_refill_from_selects_the_swapped_or_the_waiting_queue() -> None:
    specs = [spec("a", 0, 4, 9), spec("b", 0, 3, 9), spec("c", 1, 3, 2)]
    first = {}
    for refill_from in ("swapped", "waiting"):
        steps = run_steps(
            specs, blocks=6, block_size=2, decode_batch=2, preempted_to="swapped", refill_from=refill_from
        )
        prompts = [ids for _, kind, ids in steps if kind == "prefill"]
        assert prompts[:2] == ["a", "b"]
        first[refill_from] = prompts[2]
    assert first == {"swapped": "b", "waiting": "c"}


@pytest.mark.parametrize(
    ("victim", "victim_id"),
    [("shortest", "b"), ("longest", "c"), ("newest", "c"), ("oldest", "a"), ("fewest-blocks", "b")],
)
def test_the_victim_rule_selects_the_victim(victim: str, victim_id: str) -> None:
    specs = [spec("a", 0, 5, 20), spec("b", 0.1, 3, 20), spec("c", 0.2, 7, 20)]
    steps = play(specs, LLMServing(decode_batch=3, victim=victim), ONE_EACH, 11, 2)[1]
    preempted = [step["preempted"][0][0] for step in steps if step["preempted"]]
    assert preempted[0] == victim_id


def test_hysteresis_admits_only_if_enough_slots_are_free() -> None:
    """Four slots, admission_hysteresis 1: one free slot admits no request, two free slots are both filled."""
    specs = [spec(id, 0, 4, output) for id, output in zip("abcdef", (2, 4, 9, 9, 3, 3), strict=True)]
    steps = run_steps(specs, decode_batch=4, prefill_batch=4, admission_hysteresis=1)
    assert [step for step in steps if step[1] == "prefill"] == [(0.0, "prefill", "abcd"), (4.0, "prefill", "ef")]
    without_hysteresis = run_steps(specs, decode_batch=4, prefill_batch=4)
    assert [step for step in without_hysteresis if step[1] == "prefill"][1] == (2.0, "prefill", "e")


@pytest.mark.parametrize("strategy", ["continuous", "static"])
def test_without_paging_out_of_range_requests_and_their_copies_are_rejected(strategy: str) -> None:
    """a and b may reach 20 tokens: both are removed at once, only a gets a response; the third row is a copy of b."""
    specs = [spec("a", 0, 18, 2), spec("b", 0, 10, 10), spec("c", 0.5, 10, 9)]
    policy = LLMServing(decode_batch=3, prefill_batch=3, strategy=strategy)
    requests, steps, _ = play(specs, policy, ONE_EACH, max_model_len=20, max_generate_length=12)
    assert [(step["t"], step["kind"], step["prompts"], step.get("padding_rows", 0)) for step in steps[:2]] == [
        (0.0, "reject", [], 0), (0.5, "prefill", ["c"], 2),
    ]  # fmt: skip
    assert [(r.outcome, r.finish, r.written) for r in requests] == [
        ("refused", 0.0, 0), ("unanswered", 0.0, 0), ("finished", 9.5, 9),  # max_generate_length needs PagedAttention
    ]  # fmt: skip


def test_padding_copies_run_only_if_a_live_request_runs() -> None:
    """a finishes with its prefill. Its copy waits for b, and runs after b's prefill."""
    steps = play([spec("a", 0, 4, 1), spec("b", 4, 4, 2)], LLMServing(decode_batch=2, strategy="continuous"), ONE_EACH)[
        1
    ]
    assert [(step["t"], step["kind"], step["prompts"], step.get("padding_rows", 0)) for step in steps] == [
        (0.0, "prefill", ["a"], 0), (4.0, "prefill", ["b"], 0), (5.0, "prefill", [], 1), (6.0, "decode", [], 0),
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", ["paged", "continuous", "static"])
def test_a_failed_prefill_fails_all_its_prompts(strategy: str) -> None:
    specs = [{**spec("a", 0), "fail_at": 1}, spec("b", 0), spec("c", 0, output=1)]
    requests = play(specs, LLMServing(decode_batch=3, prefill_batch=3, strategy=strategy), ONE_EACH)[0]
    assert [(r.outcome, r.finish) for r in requests] == [("failed", 1.0)] * 3
