"""llm-serving: every recorded decision of the real scheduler, and the knobs its users turned."""

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
    asked: list[dict[str, Any]],
    policy: LLMServing,
    cost: dict[str, float],
    blocks: int = 64,
    size: int = 16,
    **limits: Any,
) -> tuple[list[Request], list[dict[str, Any]], str | None]:
    """Run a recording's requests; return them, the decision log, and the livelock if there was one."""
    requests = [
        Request(
            q["id"], q["arrival"], q["prompt_len"], min(q.get("eos_at") or 10**9, q["max_new_tokens"]),
            limit=q["max_new_tokens"], fails=q.get("fail_at"),
        )
        for q in asked
    ]  # fmt: skip
    server = Server(policy, blocks, size, **limits)
    file = io.StringIO()
    clock = SimulatedClock(LinearCost(prefill=cost["prefill"], decode_step=cost["decode"]))
    loop = Loop(server, Inbox(requests), clock, (DecisionLog(file),), check=True)
    stuck = None
    try:
        loop.run()
    except Stuck as found:
        stuck = str(found)
    turns = [json.loads(line) for line in file.getvalue().splitlines()]
    return requests, [t for t in turns if t["kind"] != "idle" or t["evicted"] or t["admitted"]], stuck


def policy_of(config: dict[str, Any]) -> LLMServing:
    if config.get("page_attention", True):
        static = config.get("strategy") == "static"
        return LLMServing(decode_batch=config["decode_batch"][0], strategy="static-paged" if static else "paged")
    return LLMServing(
        decode_batch=config["decode_batch"][0], prefill_batch=config["prefill_batch"][0], strategy=config["strategy"]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_a_named_case_is_reproduced_step_by_step(case: Path) -> None:
    reproduces(json.loads(case.read_text()))


def reproduces(recorded: dict[str, Any]) -> None:
    """Decide all of a recording again, and find the same in every step."""
    config = recorded["config"]
    paged = config.get("page_attention", True)
    requests, turns, stuck = play(
        recorded["requests"], policy_of(config), recorded["cost"], config.get("num_blocks", 64),
        config.get("block_size", 16), max_model_len=(config.get("seq_length") or [4096])[-1],
        max_generate_length=config.get("max_generate_length"),
    )  # fmt: skip
    steps = [s for s in recorded["steps"] if s["kind"] != "idle" or s["swapped_out"] or s["inserted"]]
    assert len(turns) == len(steps)
    for ours, theirs in zip(turns, steps, strict=True):
        assert (ours["t"], ours["t_end"], ours["kind"]) == (theirs["t"], theirs["t_end"], theirs["kind"])
        assert ours["arrived"] == theirs["admitted"] or ours["kind"] == "idle"
        assert ours["waiting"] == theirs["waiting"]
        evicted = [(id, slot) for (id, _), slot in zip(ours["evicted"], ours["evicted_slots"], strict=True)]
        assert evicted == [(gone["id"], gone["slot"]) for gone in theirs["swapped_out"]]
        if paged:
            assert ours["free_after"] == theirs["free_blocks"]
            admitted = list(zip(ours["admitted"], ours["admitted_slots"], strict=True))
            assert admitted == [(new["id"], new["slot"]) for new in theirs["inserted"]]
        else:
            assert ours["free"] is ours["free_after"] is None  # no memory is counted
        if theirs["kind"] == "prefill":
            rows = [row["id"] for row in theirs["prefill"]]
            assert ours["prompts"] == list(dict.fromkeys(rows))[: len(ours["prompts"])]
            assert len(ours["prompts"]) + ours.get("padding", 0) == len(rows)
        if theirs["kind"] == "decode":
            slots = dict(zip(ours["running"], ours["slots"], strict=True))
            assert [slots[id] for id, _ in ours["chunks"]] == theirs["valid"]
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
    requests, turns, stuck = play(
        recorded["requests"], policy, recorded["cost"], recorded["num_blocks"], recorded["block_size"],
        max_model_len=recorded["seq_length"],
    )  # fmt: skip
    steps = [s for s in recorded["steps"] if s["kind"] != "idle" or s["swapped"] or s["inserted"]]
    assert len(turns) == len(steps)
    for ours, theirs in zip(turns, steps, strict=True):
        assert ours["t"] == pytest.approx(theirs["t"], rel=1e-12)
        assert (ours["kind"], ours["free_after"], ours["waiting"]) == (
            theirs["kind"],
            theirs["free"],
            theirs["waiting"],
        )
        evicted = [[id, slot] for (id, _), slot in zip(ours["evicted"], ours["evicted_slots"], strict=True)]
        assert evicted == theirs["swapped"]
        assert [list(new) for new in zip(ours["admitted"], ours["admitted_slots"], strict=True)] == theirs["inserted"]
        if theirs["kind"] == "prefill":
            assert ours["prompts"] == [theirs["what"]]
        if theirs["kind"] == "decode":
            slots = dict(zip(ours["running"], ours["slots"], strict=True))
            assert [slots[id] for id, _ in ours["chunks"]] == theirs["what"]
    assert (stuck is not None) == (recorded["error"] is not None)
    told = {r.id: r.finish for r in requests if r.outcome in ("finished", "refused")}
    assert told == pytest.approx(recorded["finished_at"], rel=1e-12)


ONE_EACH = {"prefill": 1.0, "decode": 1.0}


def ask(id: str, arrival: float, prompt: int = 4, output: int = 3) -> dict[str, Any]:
    return {"id": id, "arrival": arrival, "prompt_len": prompt, "max_new_tokens": output}


def log_of(asked: list[dict[str, Any]], blocks: int = 64, size: int = 16, **fields: Any) -> list[tuple[Any, ...]]:
    turns = play(asked, LLMServing(**fields), ONE_EACH, blocks, size)[1]
    return [(t["t"], t["kind"], "".join(str(id) for id, _ in t["chunks"])) for t in turns]


def test_several_prompts_run_in_one_prefill_when_the_batch_allows() -> None:
    asked = [ask("a", 0), ask("b", 0), ask("c", 0)]
    assert log_of(asked, decode_batch=3, prefill_batch=2)[:3] == [
        (0.0, "prefill", "ab"), (1.0, "prefill", "c"), (2.0, "decode", "abc"),
    ]  # fmt: skip


def test_the_delay_factor_holds_back_a_request_until_it_is_old_enough() -> None:
    """a prefills 0-1, so latency 1; b arrives at 1.5 and with factor 2 must wait for more than 2 s: from 3.5 on."""
    asked = [ask("a", 0, output=8), ask("b", 1.5, output=1)]
    starts = {}
    for variant in ("queue", "request"):
        turns = log_of(asked, decode_batch=2, delay_factor=2.0, delay_variant=variant)
        starts[variant] = [turn for turn in turns if "b" in turn[2]]
    assert starts["queue"][0] == (4.0, "prefill", "b")
    assert starts["request"][0] == (4.0, "prefill", "b")


def test_whole_queue_and_per_request_gates_differ_on_the_second_in_line() -> None:
    """b (1.5) is old enough at 4, c (3.5) is not; the whole-queue gate lets both in."""
    asked = [ask("a", 0, output=9), ask("b", 1.5, output=1), ask("c", 3.5, output=1)]
    both = log_of(asked, decode_batch=3, delay_factor=2.0, delay_variant="queue", prefill_batch=2)
    single = log_of(asked, decode_batch=3, delay_factor=2.0, delay_variant="request", prefill_batch=2)
    assert (4.0, "prefill", "bc") in both
    assert (4.0, "prefill", "b") in single


def test_the_contest_gate_makes_a_lone_request_wait_after_a_lull() -> None:
    """Its clock is the last admission: after 34 s of lull, factor 0.5 waits 17 s with every slot free."""
    asked = [ask("a", 0, output=1), ask("b", 34, output=1)]
    turns = log_of(asked, decode_batch=2, delay_factor=0.5, delay_variant="contest")
    assert turns[1][1:] == ("prefill", "b")
    assert turns[1][0] == pytest.approx(51.0)
    mended = log_of(asked, decode_batch=2, delay_factor=0.5, delay_variant="contest", mend_delay=True)
    assert mended[1] == (34.0, "prefill", "b")


def test_the_contest_gate_as_reported_dies_on_an_empty_queue() -> None:
    fields = {"decode_batch": 2, "delay_factor": 0.5, "delay_variant": "contest-as-reported"}
    stuck = play([ask("a", 0)], LLMServing(**fields), ONE_EACH)[2]
    assert stuck is not None
    assert "empty waiting queue" in stuck
    assert play([ask("a", 0)], LLMServing(**fields, mend_delay=True), ONE_EACH)[2] is None


def test_evicted_requests_of_a_swapped_queue_return_before_or_after_those_waiting() -> None:
    asked = [ask("a", 0, 4, 9), ask("b", 0, 3, 9), ask("c", 1, 3, 2)]
    first = {}
    for serve_first in ("swapped", "waiting"):
        turns = log_of(asked, blocks=6, size=2, decode_batch=2, evicted="swapped", serve_first=serve_first)
        prompts = [who for _, kind, who in turns if kind == "prefill"]
        assert prompts[:2] == ["a", "b"]
        first[serve_first] = prompts[2]
    assert first == {"swapped": "b", "waiting": "c"}


@pytest.mark.parametrize(
    ("victim", "gone"),
    [("shortest", "b"), ("longest", "c"), ("newest", "c"), ("oldest", "a"), ("fewest-blocks", "b")],
)
def test_the_victim_is_chosen_by_the_rule(victim: str, gone: str) -> None:
    asked = [ask("a", 0, 5, 20), ask("b", 0.1, 3, 20), ask("c", 0.2, 7, 20)]
    turns = play(asked, LLMServing(decode_batch=3, victim=victim), ONE_EACH, 11, 2)[1]
    evicted = [turn["evicted"][0][0] for turn in turns if turn["evicted"]]
    assert evicted[0] == gone


def test_hysteresis_admits_only_once_enough_slots_are_free() -> None:
    """Four slots, opened above 1: when one is free nobody enters, when two are free both are filled."""
    asked = [ask(id, 0, 4, output) for id, output in zip("abcdef", (2, 4, 9, 9, 3, 3), strict=True)]
    turns = log_of(asked, decode_batch=4, prefill_batch=4, open_above=1)
    assert [t for t in turns if t[1] == "prefill"] == [(0.0, "prefill", "abcd"), (4.0, "prefill", "ef")]
    eager = log_of(asked, decode_batch=4, prefill_batch=4)
    assert [t for t in eager if t[1] == "prefill"][1] == (2.0, "prefill", "e")


@pytest.mark.parametrize("strategy", ["continuous", "static"])
def test_without_paging_too_nobody_out_of_range_is_run_and_its_copies_leave_with_it(strategy: str) -> None:
    """a and b may reach 20 tokens: both leave at once, only a is told; the third row is a copy of b."""
    asked = [ask("a", 0, 18, 2), ask("b", 0, 10, 10), ask("c", 0.5, 10, 9)]
    policy = LLMServing(decode_batch=3, prefill_batch=3, strategy=strategy)
    requests, turns, _ = play(asked, policy, ONE_EACH, max_model_len=20, max_generate_length=12)
    assert [(t["t"], t["kind"], t["prompts"], t.get("padding", 0)) for t in turns[:2]] == [
        (0.0, "reject", [], 0), (0.5, "prefill", ["c"], 2),
    ]  # fmt: skip
    assert [(r.outcome, r.finish, r.written) for r in requests] == [
        ("refused", 0.0, 0), ("unanswered", 0.0, 0), ("finished", 9.5, 9),  # max_generate_length is PagedAttention's
    ]  # fmt: skip


def test_copies_are_not_run_for_nobody() -> None:
    """a ends with its prompt: its copy waits until b has come, and runs behind b's prompt."""
    turns = play([ask("a", 0, 4, 1), ask("b", 4, 4, 2)], LLMServing(decode_batch=2, strategy="continuous"), ONE_EACH)[1]
    assert [(t["t"], t["kind"], t["prompts"], t.get("padding", 0)) for t in turns] == [
        (0.0, "prefill", ["a"], 0), (4.0, "prefill", ["b"], 0), (5.0, "prefill", [], 1), (6.0, "decode", [], 0),
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", ["paged", "continuous", "static"])
def test_a_prefill_that_fails_fails_all_its_prompts(strategy: str) -> None:
    asked = [{**ask("a", 0), "fail_at": 1}, ask("b", 0), ask("c", 0, output=1)]
    requests = play(asked, LLMServing(decode_batch=3, prefill_batch=3, strategy=strategy), ONE_EACH)[0]
    assert [(r.outcome, r.finish) for r in requests] == [("failed", 1.0)] * 3
