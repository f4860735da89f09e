"""The llm-serving adapter: with the stock policy it reproduces the recordings of the real server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
from servesim.calibrate.adapter.llm_serving import Adapter
from servesim.core import Plan, Policy, Request
from servesim.policies.llm_serving import LLMServing

from ...conftest import RECORDINGS
from .llm_serving_standin import Master, Schedule, install_in

RECORDED = RECORDINGS / "llm-serving"
PAGED = [path for path in sorted(RECORDED.glob("*.json")) if path.stem[:2] < "20"]


class ObservedAdapter(Adapter):
    """An adapter that keeps the last plan."""

    plan = Plan()

    def apply(self, plan: Plan, schedule: Any, entries: dict[Request, Any]) -> None:
        self.plan = plan
        super().apply(plan, schedule, entries)


def run_server(
    requests: list[dict[str, Any]], cost: dict[str, float], policy: Policy, batch: int, blocks: int, block_size: int,
    seq_length: int = 4096, max_length: Optional[int] = None, max_steps: int = 5000, lag: int = 1,
    master: type[Master] = Master,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Run the stand-in with the adapter; yield every step in the form of the recordings.

    The scheduler sees a request that arrives during call n after call n + lag - 1, or at once if the server is idle.
    An idle server asks the policy all the time; here the clock jumps to the time at which its answer can change.
    """
    schedule_class = type("Schedule", (Schedule,), {})
    master_class = type("Master", (master,), {})
    clock = [0.0]
    schedule = schedule_class(batch, blocks, block_size, seq_length, max_length)
    adapter = ObservedAdapter(policy.replace(decode_batch=batch), lambda: clock[0])
    schedule_class._continuous_batch_pa = lambda self: adapter.fill_slots(self)
    if getattr(policy, "prefill_batch", 1) > 1:
        master_class._check_prompt_predict_data_pa = staticmethod(
            lambda entries: ([entries[slot] for slot in adapter.prompts], adapter.prompts)
        )
    server = master_class(schedule)
    coming = sorted(requests, key=lambda request: request["arrival"])
    delayed: list[tuple[int, dict[str, Any]]] = []
    calls, idle = 0, True
    for _ in range(max_steps):
        now = clock[0]
        delayed += [(calls + lag - 1, request) for request in coming if request["arrival"] <= now]
        coming = [request for request in coming if request["arrival"] > now]
        due = [request for visible_after, request in delayed if idle or visible_after <= calls]
        delayed = [] if idle else [item for item in delayed if item[0] > calls]
        schedule.waiting_request_queue.extend(map(schedule.entry, due))
        kind, slots = server.step()
        yield step_record(now, kind, slots, due, schedule)
        calls += kind in ("prefill", "decode")
        idle = kind == "idle"
        if not idle:
            clock[0] = now + cost.get(kind, 0.0)
        elif not delayed:
            next_times = [request["arrival"] for request in coming[:1]]
            if adapter.plan.hold.until is not None:
                next_times.append(adapter.plan.hold.until)
            if not next_times:
                return
            clock[0] = min(next_times)


def step_record(now: float, kind: str, slots: list[int], due: list[dict[str, Any]], schedule: Any) -> dict[str, Any]:
    entries = schedule.running_request_list
    return {
        "t": now,
        "kind": kind,
        "admitted": [request["id"] for request in due],
        "swapped": [(id, slot) for what, id, slot in schedule.log if what == "swapped"],
        "inserted": [(id, slot) for what, id, slot in schedule.log if what == "inserted"],
        "ran": slots,
        "free": len(schedule.pool.free_blocks),
        "waiting": [entry.request_id for entry in schedule.waiting_request_queue],
        "slots": [
            {
                "id": e.request_id,
                "status": e.entry_data.status.name,
                "is_prompt": e.is_prompt,
                "out": e.entry_data.get_output_len(),
                "blocks": e.cache_engine.block_table,
                "kv": e.cache_engine.num_token,
            }
            for e in entries
        ],
    }


@pytest.mark.parametrize("case", PAGED, ids=lambda path: path.stem)
def test_named_case_matches_the_recording_including_block_ids(case: Path) -> None:
    recorded = json.loads(case.read_text())
    config = recorded["config"]
    steps = run_server(
        recorded["requests"], recorded["cost"], LLMServing(), config["decode_batch"][0], config["num_blocks"],
        config["block_size"], (config.get("seq_length") or [4096])[-1], config.get("max_generate_length"),
    )  # fmt: skip
    compared = 0
    for theirs, ours in zip(recorded["steps"], steps):
        compared += 1
        assert (ours["t"], ours["kind"], ours["admitted"]) == (theirs["t"], theirs["kind"], theirs["admitted"])
        assert ours["swapped"] == [(gone["id"], gone["slot"]) for gone in theirs["swapped_out"]]
        assert ours["inserted"] == [(new["id"], new["slot"]) for new in theirs["inserted"]]
        assert ours["waiting"] == theirs["waiting"]
        assert ours["free"] == theirs["free_blocks"]
        if theirs["kind"] == "prefill":
            assert ours["ran"] == [one["slot"] for one in theirs["prefill"]]
        keys = ("id", "status", "is_prompt", "out", "blocks", "kv")
        assert ours["slots"] == [{key: slot[key] for key in keys} for slot in theirs["slots"]]
    rest = recorded["steps"][compared:]  # a livelock, which idles forever
    assert all(theirs["kind"] == "idle" for theirs in rest)
    assert not rest or recorded["error"]["type"] == "LIVELOCK"


def test_60_random_cases_match_the_recordings() -> None:
    with gzip.open(RECORDED / "vectors.jsonl.gz", "rt") as lines:
        vectors = [json.loads(line) for line in lines]
    assert len(vectors) == 60
    compared = 0
    for vector in vectors:
        steps = run_server(
            vector["requests"], vector["cost"], LLMServing(), vector["decode_batch_size"], vector["num_blocks"],
            vector["block_size"], vector["seq_length"],
        )  # fmt: skip
        for theirs, ours in zip(vector["steps"], steps):
            assert (ours["t"], ours["kind"]) == (theirs["t"], theirs["kind"])
            assert (ours["free"], ours["waiting"]) == (theirs["free"], theirs["waiting"])
            assert [id for id, _ in ours["swapped"]] == [
                one[0] if isinstance(one, list) else one for one in theirs["swapped"]
            ]
            assert [list(one) for one in ours["inserted"]] == theirs["inserted"]
            assert [compact(slot) for slot in ours["slots"]] == theirs["slots"]
            compared += 1
    assert compared > 2000


def compact(slot: dict[str, Any]) -> Optional[list[Any]]:
    """Return a slot in the form of the random recordings."""
    if slot["status"] not in ("RUNNING", "INPUT_OUTOFRANGE"):
        return None
    return [slot["id"], slot["out"], slot["kv"], len(slot["blocks"])]


def test_requests_in_the_swapped_queue_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Schedule", (Schedule,), {})
    install_in(monkeypatch, LLMServing(preempted_to="swapped"), kind, Master)
    schedule = kind(2, 4, 4, 4096, None)  # three free blocks; each of two prompts needs one block and then more
    master = Master(schedule)
    for k in range(3):
        schedule.waiting_request_queue.append(schedule.entry({"id": str(k), "prompt_len": 4, "max_new_tokens": 9}))
    counts = []
    for _ in range(4):  # two prefills, then decodes with enough blocks for one request only
        master.step()
        counts.append((schedule.get_queue_len(), len(schedule.waiting_request_queue)))
    assert counts[-1] == (2, 1)
