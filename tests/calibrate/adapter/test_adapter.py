"""The llm-serving adapter: with the stock policy it reproduces the recordings of the real server."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
from servesim.calibrate.adapter.llm_serving import Adapter, install, policy_from
from servesim.core import BadInput, Policy
from servesim.policies import POLICIES
from servesim.policies.llm_serving import LLMServing

from ...conftest import RECORDINGS, ROOT
from ...policies.test_llm_serving import play
from .llm_serving_standin import EntryStatus, Master, Schedule

RECORDED = RECORDINGS / "llm-serving"
PAGED = [path for path in sorted(RECORDED.glob("*.json")) if path.stem[:2] < "20"]


def run_server(
    requests: list[dict[str, Any]], cost: dict[str, float], policy: Policy, batch: int, blocks: int, block_size: int,
    seq_length: int = 4096, max_length: Optional[int] = None, max_steps: int = 5000, lag: int = 1,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Run the stand-in with the adapter; yield every step in the form of the recordings.

    The scheduler sees a request that arrives during call n after call n + lag - 1, or at once if the server is idle.
    """
    schedule_class = type("Schedule", (Schedule,), {})
    master_class = type("Master", (Master,), {})
    clock = [0.0]
    schedule = schedule_class(batch, blocks, block_size, seq_length, max_length)
    adapter = Adapter(policy.replace(decode_batch=batch), lambda: clock[0])
    schedule_class._continuous_batch_pa = lambda self: adapter.fill_slots(self)
    if getattr(policy, "prefill_batch", 1) > 1:
        master_class._check_prompt_predict_data_pa = staticmethod(
            lambda entries: ([entries[slot] for slot in adapter.prompts], adapter.prompts)
        )
    master = master_class(schedule)
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
        kind, slots = master.step()
        yield step_record(now, kind, slots, due, schedule)
        calls += kind in ("prefill", "decode")
        idle = kind == "idle"
        if not idle:
            clock[0] = now + cost.get(kind, 0.0)
        elif not delayed:
            if not coming:
                return
            clock[0] = coming[0]["arrival"]


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


def test_delay_factor_with_a_swapped_queue_serves_all_requests() -> None:
    policy = LLMServing(delay_factor=0.5, delay_variant="queue", preempted_to="swapped")
    requests = [{"id": f"r{k}", "arrival": k * 1.5, "prompt_len": 5 + k % 4, "max_new_tokens": 9} for k in range(14)]
    steps = list(run_server(requests, {"prefill": 3.0, "decode": 1.0}, policy, batch=3, blocks=11, block_size=4))
    preempted = [id for step in steps for id, _ in step["swapped"]]
    assert preempted
    assert not any(id in step["waiting"] for step in steps for id, _ in step["swapped"])  # they are in `swapped`
    last = steps[-1]
    assert last["free"] == 10
    assert last["waiting"] == []
    assert all(slot["status"] not in ("RUNNING", "WAITING") for slot in last["slots"])
    done = {slot["id"] for step in steps for slot in step["slots"] if slot["status"] == "FINISHED_LENGTH_CAPPED"}
    assert done == {f"r{k}" for k in range(14)}


def test_order_longest_output_admits_the_longest_first() -> None:
    requests = [{"id": f"r{k}", "arrival": 0.0, "prompt_len": 4, "max_new_tokens": 2 + k} for k in range(6)]
    steps = list(run_server(requests, {"prefill": 1.0, "decode": 1.0}, LLMServing(order="longest-output"), 2, 40, 4))
    inserted = [id for step in steps for id, _ in step["inserted"]]
    assert inserted == ["r5", "r4", "r3", "r2", "r1", "r0"]


def test_several_prompts_run_in_one_call_with_prefill_batch() -> None:
    requests = [{"id": f"r{k}", "arrival": 0.0, "prompt_len": 4, "max_new_tokens": 3} for k in range(6)]
    steps = list(run_server(requests, {"prefill": 1.0, "decode": 1.0}, LLMServing(prefill_batch=4), 4, 40, 4))
    assert [step["ran"] for step in steps if step["kind"] == "prefill"] == [[0, 1, 2, 3], [0, 1]]


SETTINGS: dict[str, dict[str, Any]] = {
    "stock": {},
    "late-first": {"order": "longest-output", "max_wait": 20.0, "preempted_to": "ranked"},
    "late-first, preempted to the front": {"order": "shortest-prompt", "max_wait": 10.0},
    "preempted to the back": {"preempted_to": "sorted"},
    "longest-first": {"order": "longest-output", "preempted_to": "ranked"},
    "swapped, newest": {"preempted_to": "swapped", "victim": "newest"},
    "swapped, older": {"preempted_to": "swapped", "refill_from": "older", "victim": "longest"},
    "delay": {"delay_factor": 0.5, "delay_variant": "queue", "preempted_to": "swapped"},
    "delay by request": {"delay_factor": 2.0, "delay_variant": "request"},
    "hysteresis": {"admission_hysteresis": 1, "preempted_to": "swapped", "refill_from": "waiting"},
    "several": {"prefill_batch": 3},
}


def random_world(rng: random.Random) -> tuple[list[dict[str, Any]], int, int, int]:
    """Return requests, slots, blocks and block size; with few blocks, so that many requests are preempted."""
    requests = [
        {
            "id": f"r{k:02d}",
            "arrival": rng.choice([0.0, float(rng.randint(0, 60))]),
            "prompt_len": rng.randint(1, 12),
            "max_new_tokens": rng.randint(1, 16),
        }
        for k in range(rng.randint(4, 24))
    ]
    return sorted(requests, key=lambda request: request["arrival"]), rng.randint(1, 5), rng.randint(9, 20), 4


@pytest.mark.parametrize("lag", [2, 7])  # without a lag, a policy may know when a request arrived during a call
@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS)
def test_policy_decides_the_same_in_the_server_and_in_the_simulation(fields: dict[str, Any], lag: int) -> None:
    compared = preempted = 0
    for seed in range(30):
        requests, batch, blocks, size = random_world(random.Random(seed))
        cost = {"prefill": 3.0, "decode": 1.0}
        policy = LLMServing(decode_batch=batch, **fields)
        steps = list(run_server(requests, cost, policy, batch, blocks, size, max_steps=1500, lag=lag))
        _, simulated, stuck = play(requests, policy, cost, blocks, size, lag)
        if stuck:
            continue
        theirs = [(t["t"], t["kind"], t["swapped"], t["inserted"], t["free"]) for t in steps if t["kind"] != "idle"]
        ours = [
            (t["t"], t["kind"], with_slots(t, "evicted"), with_slots(t, "admitted"), t["free_after"])
            for t in simulated if t["kind"] != "idle"
        ]  # fmt: skip
        assert theirs == ours
        compared += len(ours)
        preempted += sum(len(step[2]) for step in ours)
    assert compared > 1000
    assert preempted > 20


def with_slots(step: dict[str, Any], key: str) -> list[tuple[Any, Any]]:
    """Return the moved requests of a step of a log, with their slots."""
    ids = [moved[0] for moved in step[key]] if key == "evicted" else step[key]
    return list(zip(ids, step[f"{key}_slots"]))


def test_install_replaces_the_scheduling_of_a_class_and_uses_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Schedule", (Schedule,), {})
    install(LLMServing(delay_factor=0.5, delay_variant="queue"), kind, Master)
    schedule = kind(3, 20, 4, 4096, None)
    for k in range(5):
        schedule.waiting_request_queue.append(schedule.entry({"id": str(k), "prompt_len": 3, "max_new_tokens": 2}))
    schedule._continuous_batch_pa()
    assert [entry.entry_data.status for entry in schedule.running_request_list] == [EntryStatus.RUNNING] * 3
    assert len(schedule.waiting_request_queue) == 2
    with pytest.raises(BadInput, match="SERVESIM_MULTI_PREFILL=1"):
        install(LLMServing(prefill_batch=8), kind, Master)
    monkeypatch.setenv("SERVESIM_MULTI_PREFILL", "1")
    install(LLMServing(prefill_batch=8), kind, type("Master", (Master,), {}))


@pytest.mark.parametrize("module", ["servesim.calibrate.adapter", "servesim.calibrate.adapted"])
def test_adapter_module_installs_a_policy_in_the_server_process(tmp_path: Path, module: str) -> None:
    for name, kind in (("schedule", "Schedule"), ("master", "AsyncMaster")):
        folder = tmp_path / "mindspore_serving" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(f"class {kind}:\n    def _continuous_batch_pa(self): pass\n")
    script = tmp_path / "server_app_post.py"
    script.write_text(
        "import sys\nfrom mindspore_serving.schedule.schedule import Schedule\n"
        "print(Schedule._continuous_batch_pa.__module__, sys.argv[1:], __name__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SERVESIM_POLICY": '{"delay_factor": 0.5}'}
    command = [sys.executable, "-m", module, str(script), "--config", "x.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    expected = "servesim.calibrate.adapter.llm_serving ['--config', 'x.yaml'] __main__"
    assert done.stdout.split("\n")[0] == expected, done.stderr


def test_a_server_without_paged_scheduling_and_a_crashing_policy_are_rejected() -> None:
    with pytest.raises(BadInput, match="Schedule has no _continuous_batch_pa"):
        install(LLMServing(), type("Schedule", (), {}), Master)
    with pytest.raises(BadInput, match="set fix_delay_bugs"):
        install(LLMServing(delay_factor=1, delay_variant="contest-as-reported"), type("Schedule", (Schedule,), {}))


def test_requests_in_the_swapped_queue_count_as_waiting() -> None:
    kind = type("Schedule", (Schedule,), {})
    install(LLMServing(preempted_to="swapped"), kind, Master)
    schedule = kind(2, 4, 4, 4096, None)  # three free blocks; each of two prompts needs one block and then more
    master = Master(schedule)
    for k in range(3):
        schedule.waiting_request_queue.append(schedule.entry({"id": str(k), "prompt_len": 4, "max_new_tokens": 9}))
    counts = []
    for _ in range(4):  # two prefills, then decodes with enough blocks for one request only
        master.step()
        counts.append((schedule.get_queue_len(), len(schedule.waiting_request_queue)))
    assert counts[-1] == (2, 1)


def test_policies_of_other_engines_are_rejected() -> None:
    for name in ("vllm", "sarathi"):
        with pytest.raises(BadInput, match="expected a policy of the llm-serving family"):
            Adapter(POLICIES[name]())
    for strategy in ("static", "static-paged"):
        with pytest.raises(BadInput, match="family"):
            Adapter(LLMServing(strategy=strategy))
    assert policy_from('{"delay_factor": 2}') == LLMServing(delay_factor=2)
    for text, complaint in (("[", "expected a JSON object"), ('{"name": "x"}', "no policy"), ('{"speed": 1}', "speed")):
        with pytest.raises(BadInput, match=complaint):
            policy_from(text)


def interpreters() -> list[str]:
    """Return this interpreter and, if installed, a Python 3.9 as on the hosts of llm-serving."""
    old = [shutil.which("python3.9"), *map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python"))]
    return [sys.executable, *[python for python in old if python and runs(python)][:1]]


def runs(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("python", interpreters(), ids=lambda python: Path(python).name)
def test_adapter_and_live_driver_need_only_the_standard_library(python: str) -> None:
    code = """
import sys
sys.path.insert(0, "calibrate/device")
import worker
sys.path.pop(0)
sys.meta_path.insert(0, worker.PackageFinder(ROOT + "/calibrate/device"))
import servesim.calibrate.adapter.llm_serving
import servesim.calibrate.live.driver
import servesim.calibrate.server.engine_process
foreign = {"numpy", "simpy", "yaml", "pydantic", "pandas", "aiohttp"} & set(sys.modules)
assert not foreign, foreign
"""
    command = [python, "-I", "-S", "-c", code.replace("ROOT", repr(str(ROOT)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
