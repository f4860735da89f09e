"""`sim replay --check-tokens`: equal answers for every policy, a broken allocator is found, near ties, bad input."""

from __future__ import annotations

import importlib
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
import yaml
from servesim.calibrate.device.backend import Backend, Row
from servesim.calibrate.live import recorded_answers
from servesim.calibrate.live.block_tables import BlockTables
from servesim.calibrate.live.recorded_answers import (
    AnswerRecord,
    SingleRun,
    check_answers,
    near_tie_bound,
    spread_sample,
)
from servesim.calibrate.live.setup import DeviceSession
from servesim.calibrate.replay.replay import replay_on_backend
from servesim.calibrate.replay.token_check import TokenCheck, allowed_differences
from servesim.config.registry import make_policy
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request
from servesim.policies import POLICIES

from ...commands.running import run_sim
from ...conftest import ROOT
from ..device.kbk_host import kbk_python
from ..device.stepping_worker import worker_python

pytestmark = pytest.mark.timeout(1800)
SHARED_BLOCK = Path(__file__).with_name("shared_block_worker.py")

ENGINE = {"num_blocks": 24, "block_size": 8, "host_blocks": 40, "max_model_len": 96}
# Settings that make a policy preempt, swap or chunk with these requests, and give it batches of several rows.
SETTINGS: dict[str, dict[str, Any]] = {
    "llm-serving": {"decode_batch": 6, "prefill_batch": 2},
    "vllm": {"preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 6},
    "vllm-chunked": {"max_num_seqs": 6, "max_num_batched_tokens": 24},
    "vllm-v1": {"max_num_seqs": 6, "max_num_batched_tokens": 24},
    "sarathi": {"chunk_size": 16, "max_num_seqs": 6},
    "splitfuse": {"max_ragged_batch_size": 24},
    "sglang": {"chunked_prefill_size": 16, "disable_radix_cache": True, "disable_overlap_schedule": True},
    "vllm-ascend-recompute": {"kv_consumer": False},  # a decode node does not finish preempted requests
}
# What must happen in a burst, whatever the step times are.
EVENTS = {"vllm": "swapped", "vllm-chunked": "chunked", "vllm-v1": "preempted", "sarathi": "chunked",
          "sarathi-alternating": "preempted", "sglang": "chunked"}  # fmt: skip
SCENARIO: dict[str, Any] = {
    "workload": {
        "requests": 12,
        "arrivals": {"kind": "poisson", "rate": 400},
        "lengths": {
            "prompt": {"kind": "uniform", "low": 12, "high": 40},
            "output": {"kind": "uniform", "low": 6, "high": 16},
        },
    },
    "policy": {"name": "vllm", "preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 6},
    "engine": ENGINE,
    "profile": {"base": 0.001, "decode_live": 0.0001},
}


def burst() -> list[Request]:
    return [Request(id, 0.0, 5 + 7 * (id % 6), 4 + 3 * (id % 5)) for id in range(14)]


def scenario_of(policy: str, **settings: Any) -> Scenario:
    return scenario_from({"policy": {"name": policy, **SETTINGS.get(policy, {}), **settings}, "engine": ENGINE})


def write_scenario(folder: Path, **changes: Any) -> str:
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, **changes}))
    return str(file)


def loaded(backend: str, python: Optional[str]) -> Iterator[DeviceSession]:
    options = {"threads": 1, **({"device": "cpu"} if backend == "torch" else {})}
    with DeviceSession(backend, "micro", python, options=options) as session:
        session.load([scenario_of(policy) for policy in POLICIES])
        yield session


@pytest.fixture(scope="module")
def torch_session() -> Iterator[DeviceSession]:
    pytest.importorskip("torch")
    yield from loaded("torch", None)


@pytest.fixture(scope="module")
def kbk_session() -> Iterator[DeviceSession]:
    yield from loaded("kbk", kbk_python())


def check_policy(session: DeviceSession, policy: str, **settings: Any) -> TokenCheck:
    """Run a burst under a policy, and all of its requests alone."""
    requests, scenario = burst(), scenario_of(policy, **settings)
    live = replay_on_backend(session, policy, scenario, requests, None, check_tokens=len(requests)).live
    assert live.token_check is not None
    check = live.token_check
    assert [answer.id for answer in check.different] == []
    assert sorted(answer.id for answer in check.answers) == [request.id for request in requests]
    assert all(answer.tokens == requests[answer.id].output for answer in check.answers)
    logits = check.logits
    assert logits["compared"] == sum(request.output for request in requests)
    assert logits["not_finite"] == 0
    assert logits["relative"] < 4 * near_tie_bound(session.about["model"], "float32")
    return check


@pytest.mark.parametrize("policy", [*EVENTS, "llm-serving", "splitfuse"])
def test_on_torch_in_float32_all_answers_are_equal(policy: str, torch_session: DeviceSession) -> None:
    check = check_policy(torch_session, policy)
    assert EVENTS.get(policy) in {None, *(event for answer in check.answers for event in answer.events)}


@pytest.mark.kbk
@pytest.mark.parametrize("policy", POLICIES)
def test_on_kbk_in_float32_all_answers_are_equal(policy: str, kbk_session: DeviceSession) -> None:
    asynchronous = getattr(make_policy({"name": policy}), "async_scheduling", False)
    check_policy(kbk_session, policy, **({"async_scheduling": False} if asynchronous else {}))


def check_block_in_two_tables(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> None:
    command = ["replay", write_scenario(folder), "--live-only", "--quiet", "--warm-up", "0", "--check-tokens", "all"]
    said = run_sim(capsys, *command, "-o", str(folder / "out"), *options)
    assert said.code == 3, said.error
    assert "first difference at token" in said.out
    check = json.loads((folder / "out" / "live" / "result.json").read_text())["token_check"]
    assert 0 < check["different"] < check["checked"] == 12
    assert check["only_near_ties"] == 0
    within = run_sim(capsys, *command, "-o", str(folder / "again"), *options, "--tolerance-tokens", "100%")
    assert within.code == 0
    assert "tolerance 100% answers (12 of 12): met" in within.out


@pytest.mark.parametrize("backend", ["torch", pytest.param("kbk", marks=pytest.mark.kbk)])
def test_a_block_in_two_tables_is_found(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    python = worker_python(tmp_path, SHARED_BLOCK, kbk_python() if backend == "kbk" else sys.executable)
    model = ("--model", "micro", "--option", "threads=1", "--worker-python", python)
    check_block_in_two_tables(capsys, tmp_path, "--backend", backend, *model)


@pytest.mark.usefixtures("device_here")
def test_a_block_in_two_tables_of_a_fake_device_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with importlib.import_module("shared_block").broken_allocator():
        check_block_in_two_tables(capsys, tmp_path, "--backend", "fake")


@pytest.mark.usefixtures("device_here")
def test_the_check_is_in_all_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    said = run_sim(capsys, "replay", write_scenario(tmp_path), "--backend", "fake", "--check-tokens", "-o", str(out))
    assert said.code == 0
    assert "token check: 12 of 12 answers equal those of the same requests alone" in said.out
    result = json.loads((out / "live" / "result.json").read_text())["token_check"]
    assert len(result["answers"]) == result["equal"] == 12
    setting = json.loads((out / "verify.json").read_text())["comparisons"][0]
    assert setting["token_check"] == {key: value for key, value in result.items() if key != "answers"}
    assert "12 of 12 answers equal" in run_sim(capsys, "verify", str(out / "sim"), str(out / "live")).out


@pytest.mark.parametrize(
    ("text", "answers", "allowed"), [("0", 16, 0), ("3", 16, 3), ("0%", 16, 0), ("25%", 16, 4), ("9.9%", 10, 0)]
)
def test_a_tolerance_is_a_number_or_a_share_of_the_answers(text: str, answers: int, allowed: int) -> None:
    assert allowed_differences(text, answers) == allowed


def test_a_check_without_an_answer_is_not_passed() -> None:
    assert not TokenCheck([], 4, 0.0).within("100%")


def test_a_sample_is_spread_over_the_prompt_lengths_and_repeatable() -> None:
    requests = [Request(id, 0.0, 1 + id * 37 % 400, 5) for id in range(400)]
    sample = spread_sample(requests, 16, seed=3)
    assert sorted((request.prompt - 1) // 25 for request in sample) == list(range(16))  # one of each group of 25
    assert sample == spread_sample(requests, 16, seed=3)
    assert sample != spread_sample(requests, 16, seed=4)
    assert spread_sample([], 4, 0) == []
    assert set(spread_sample(requests[:3], 16, 0)) == set(requests[:3])


def test_a_sample_includes_requests_that_were_preempted_swapped_or_chunked() -> None:
    requests = [Request(id, 0.0, 10 + id, 5) for id in range(200)]
    record = AnswerRecord(lambda request: [1], ScriptedBackend([]), requests, 6, vocab=50)
    plan = SimpleNamespace(padding_rows=0, decode_first=False)
    others = [request for request in requests if request not in record.first_sample]
    preempted = [(request, "swap" if index else "recompute", None) for index, request in enumerate(others[:10])]
    record.rows(Any, SimpleNamespace(preempted=preempted, chunks=(), decode_rows=0, plan=plan), BlockTables(9, 4))  # type: ignore[arg-type]
    for request in requests:
        record.tokens[request] = array("i", [1])
        request.outcome = "finished"
    record.drop(requests)
    sample = record.sample()
    assert len(sample) == len(set(sample)) == 6
    assert [record.events.get(request) for request in sample] == [["preempted"], ["swapped"], *[None] * 4]
    assert set(sample[:2]) <= set(record.logits)  # their logits are kept from then on


class ScriptedBackend(Backend):
    """Two tokens lead; the gap of their logits is set per step."""

    def __init__(self, gaps: Sequence[float]) -> None:
        self.gaps = iter(gaps)
        self.rows: list[Row] = []

    def step(self, rows: Sequence[Row]) -> list[int]:
        self.rows += rows
        self.last = np.linspace(-1, 1, 50, dtype=np.float32)
        self.last[7], self.last[9] = 3.0 + next(self.gaps), 3.0
        return [int(self.last.argmax())]

    def logits(self, rows: Optional[Sequence[int]] = None) -> Any:
        return self.last[None]

    def describe(self) -> dict[str, Any]:
        return {"block_size": 4, "dtype": "bfloat16", "model": {"layers": 32, "hidden": 4096}}


def test_differences_are_near_ties_only_below_the_bound() -> None:
    bound = near_tie_bound({"layers": 32, "hidden": 4096}, "bfloat16")
    assert 0.2 < bound < 0.4  # standard deviations of the logits; an H200 had gaps of up to 0.19
    backend = ScriptedBackend([0.5, 0.01, 0.5, 0.01])
    checked = SingleRun(backend).check(3, [1, 2, 3, 7, 9, 9, 9], {})
    assert checked["different"] == 3
    assert checked["beyond_ties"] == 1
    assert (checked["first"]["index"], checked["first"]["near_tie"]) == (1, True)
    assert (checked["first_beyond_ties"]["index"], checked["first_beyond_ties"]["near_tie"]) == (2, False)
    assert checked["first_beyond_ties"]["gap"] == pytest.approx(0.5)
    # The single run reads the recorded tokens, also after a difference.
    assert [list(row.tokens) for row in backend.rows] == [[1, 2, 3], [7], [9], [9]]
    assert [row.position for row in backend.rows] == [0, 3, 4, 5]


def test_logits_that_are_not_finite_are_counted_and_never_a_near_tie() -> None:
    backend = ScriptedBackend([float("nan"), 0.0])
    live = np.full(50, np.nan, np.float32)
    checked = SingleRun(backend).check(1, [1, 9, 7], {0: live, 1: np.linspace(-1, 1, 50, dtype=np.float32)})
    assert checked["beyond_ties"] == checked["different"] == 1
    assert checked["logits"]["not_finite"] == 1
    json.dumps(checked, allow_nan=False)


def test_a_check_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_answers, "REPORT_INTERVAL_S", 0.0)
    requests = [Request(id, 0.0, 2, 1) for id in range(3)]
    backend = ScriptedBackend([0.5] * 3)
    record = AnswerRecord(lambda request: [1, 2], backend, requests, 3, vocab=50)
    for request in requests:
        record.tokens[request] = array("i", [1, 2, 7])
        request.outcome = "finished"
    record.drop(requests)
    stops = iter([False, False, True])
    reports: list[Any] = []
    result = check_answers(backend, record, reports.append, lambda: next(stops))
    assert (len(result["answers"]), result["stopped"], len(reports)) == (2, True, 3)


def test_logits_of_long_answers_are_spread_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recorded_answers, "LOGIT_BYTES", 4 * 50 * 5 * (1 + len(recorded_answers.EVENTS))
    )  # five rows per watched request
    request = Request("a", 0.0, 1, 20)
    backend = ScriptedBackend([0.5] * 20)
    record = AnswerRecord(lambda request: [1], backend, [request], 1, vocab=50)
    record.tokens[request] = array("i", [1])
    record.in_flight.extend([[request]] * 20)
    for _ in range(20):
        record.append(backend.step([]))
    assert list(record.logits[request]) == [0, 4, 8, 12, 16]
