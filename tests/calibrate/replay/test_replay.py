"""Replays: simulated and live runs agree on a fake backend for every policy; interrupts, rejections and files."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.live.replay_job import replay
from servesim.calibrate.live.setup import check_same_device, replay_arguments
from servesim.calibrate.probe.host_overhead import fit_overhead, overhead_samples
from servesim.calibrate.replay.replay import as_backend_scenario, replay_requests
from servesim.calibrate.replay.resimulate import MeasuredCost
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Shape
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.costs.parts import HostPart
from servesim.files.step_table import ModelCall, read_calls
from servesim.runs.run_folder import read_sent

SCENARIO: dict[str, Any] = {
    "workload": {
        "requests": 24,
        "arrivals": {"kind": "poisson", "rate": 40},
        "lengths": {
            "prompt": {"kind": "uniform", "low": 5, "high": 40},
            "output": {"kind": "uniform", "low": 2, "high": 20},
        },
    },
    "policy": {"name": "llm-serving", "decode_batch": 8},
    "engine": {"num_blocks": 30, "block_size": 8, "host_blocks": 30},
    "profile": {"base": 0.003, "prefill_token": 0.0001, "decode_live": 0.0002, "swap_block": 0.0002},
}


def write_scenario(folder: Path, **changes: Any) -> str:
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, **changes}))
    return str(file)


@pytest.mark.live
@pytest.mark.parametrize(
    "policy",
    [
        {"name": "llm-serving", "decode_batch": 8},
        {
            "name": "llm-serving",
            "decode_batch": 8,
            "delay_factor": 0.5,
            "delay_variant": "queue",
            "preempted_to": "swapped",
        },
        {"name": "vllm", "preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 8},
        {"name": "sarathi", "chunk_size": 16},
    ],
    ids=["stock", "delay and swapped queue", "swap", "chunked"],
)
def test_on_a_fake_backend_metrics_agree_within_a_percent_and_decisions_are_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: dict[str, Any]
) -> None:
    metrics = ["makespan", "request_throughput", "output_throughput", "preemptions", "model_calls"]
    metrics += [f"{k}_{n}_ms" for n in ("ttft", "tpot", "itl", "e2el") for k in ("mean", "median", "p90", "p99")]
    file = write_scenario(tmp_path, policy=policy)
    command = ["replay", file, "--backend", "fake", "--tolerance", "1%", "--metrics", *metrics, "-o", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "decisions: identical" in out
    assert "tolerance 1 %: met" in out
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report["comparisons"][0]["decisions"]["identical"] is True
    live = json.loads((tmp_path / "live" / "result.json").read_text())
    assert live["completed"] == 24
    assert live["blocks_left"] == live["blocks"]
    assert {path.name for path in (tmp_path / "live").iterdir()} - {"device.csv"} == {  # depends on the machine
        "manifest.json", "result.json", "requests.csv", "decisions.jsonl.gz", "steps.csv", "sent.jsonl",
        "timeline.json.gz",
    }  # fmt: skip


@pytest.mark.live
def test_on_the_wall_clock_measured_step_times_explain_the_whole_run(tmp_path: Path) -> None:
    from servesim.calibrate.replay.measured_run import run_from_result
    from servesim.calibrate.replay.resimulate import resimulate
    from servesim.calibrate.replay.verify import compare
    from servesim.runs.run_folder import run_data

    scenario = as_backend_scenario(scenario_from(SCENARIO))
    requests = replay_requests(scenario)
    backend = FakeBackend({"base": 0.002, "prefill_token": 5e-5, "decode_row": 1e-4})
    backend.load(MODELS["tiny"], 31, 8, 30)
    result = json.loads(json.dumps(replay(backend, replay_arguments(scenario, requests, MODELS["tiny"], warm_up=8))))
    profile = Profile("none", LinearCost(base=0.002))
    measured = run_data(run := run_from_result(scenario, profile, requests, result), run.decisions)
    resimulated, calls_matched = resimulate(measured, profile)
    assert calls_matched == len(result["calls"])
    comparison = compare(resimulated, measured)
    assert comparison.decisions.identical
    assert all(abs(row.error or 0.0) < 1e-9 for row in comparison.rows)
    assert 0 < sum(result["host"]) < 0.5


def test_decisions_of_a_burst_on_torch_match_the_simulation() -> None:
    pytest.importorskip("torch")
    from servesim.calibrate.live.setup import DeviceSession
    from servesim.calibrate.replay.replay import replay_on_backend
    from servesim.core import Request

    policy = {"name": "vllm", "preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 6}
    engine = {"num_blocks": 12, "block_size": 8, "host_blocks": 12}
    scenario = scenario_from({"policy": policy, "engine": engine})
    requests = [Request(id, 0.0, 9 + 3 * id, 8) for id in range(6)]
    with DeviceSession("torch", "micro", options={"device": "cpu"}) as session:
        session.load([scenario])
        replayed = replay_on_backend(
            session, "burst", scenario, requests, Profile("crude", LinearCost(base=0.01)), warm_up=2
        )
    comparison = replayed.comparison
    assert comparison.decisions.identical
    assert comparison.calls_matched == (replayed.live.calls, replayed.live.calls)
    assert comparison.row("preemptions").measured == comparison.row("preemptions").simulated
    assert (comparison.row("preemptions").measured or 0) > 0
    assert replayed.live.extra["blocks_left"] == replayed.live.extra["blocks"] == 12


def test_equal_seeds_give_equal_outputs_under_different_policies() -> None:
    records = []
    for policy in ({"name": "llm-serving", "decode_batch": 3}, {"name": "sarathi", "chunk_size": 9}):
        scenario = as_backend_scenario(scenario_from({**SCENARIO, "policy": policy}))
        backend = RecordingBackend({})
        backend.load(MODELS["tiny"], 31, 8, 30)
        replay(backend, replay_arguments(scenario, replay_requests(scenario, time_scale=0.01), MODELS["tiny"], 0))
        records.append(backend.record)
    assert records[0] == records[1]
    assert len(records[0]) > 50


class RecordingBackend(FakeBackend):
    """A fake backend that records each cached context and the token generated after it."""

    record: set[tuple[tuple[int, ...], int]]

    def step(self, rows: Any) -> list[int]:
        self.record = getattr(self, "record", set())
        tokens = super().step(rows)
        for row, token in zip(rows, tokens):
            end = row.position + len(row.tokens)
            if row.position >= 40:  # behind all prompts: no chunk of one policy only ends here
                context = self.cache[list(row.table)].ravel()[:end]
                self.record.add((tuple(context.tolist()), token))
        return tokens


@pytest.mark.live
def test_ctrl_c_stops_a_replay_and_keeps_the_results_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        while "stop_on_interrupt" not in getattr(signal.getsignal(signal.SIGINT), "__qualname__", ""):
            time.sleep(0.05)
        time.sleep(4)
        os.kill(os.getpid(), signal.SIGINT)

    workload = {**SCENARIO["workload"], "requests": 400, "arrivals": {"kind": "poisson", "rate": 10}}
    threading.Thread(target=interrupt, daemon=True).start()
    command = ["replay", write_scenario(tmp_path, workload=workload), "--backend", "fake", "-o", str(tmp_path / "out")]
    assert main(command) == 130
    assert "stopped early" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "live" / "result.json").read_text())
    assert result["stopped"] is True
    assert 0 < result["completed"] < 400
    assert result["outcomes"]["unfinished"] + result["completed"] == 400


@pytest.mark.usefixtures("device_here")
def test_time_scale_and_limit_change_the_sent_requests(tmp_path: Path) -> None:
    assert main(["replay", write_scenario(tmp_path), "--backend", "fake", "--limit", "5", "--time-scale", "0.5",
                 "-o", str(tmp_path)]) == 0  # fmt: skip
    sent = read_sent(tmp_path / "live" / "sent.jsonl")
    full = replay_requests(scenario_from(SCENARIO))
    assert [request.arrival for request in sent] == [request.arrival * 0.5 for request in full[:5]]
    assert len(read_calls(tmp_path / "live" / "steps.csv")) > 5


@pytest.mark.parametrize("faulty", [["--metrics", "speed"], ["-o", "file"], ["-o", "file/below"], ["-o", "a\0b"]])
def test_what_the_report_needs_is_checked_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], faulty: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("servesim.calibrate.live.setup.DeviceSession.__init__", lambda *args: pytest.fail("started"))
    assert main(["replay", write_scenario(tmp_path), "--backend", "fake", *faulty]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_profile_of_another_device_or_kernel_set_is_rejected() -> None:
    about = {"device": "NVIDIA H200", "kernels": "fused", "dtype": "bfloat16", "model": "llama2-7b"}
    check_same_device(Profile("mine", LinearCost(), about), about)
    check_same_device(Profile("inline", LinearCost()), about)
    for key, other in (("device", "Ascend 910B4"), ("kernels", "reference"), ("model", {"name": "tiny"})):
        with pytest.raises(BadInput, match=f"measured with {key}"):
            check_same_device(Profile("other", LinearCost(), {**about, key: other}), about)


def test_requests_longer_than_the_model_context_are_rejected() -> None:
    scenario = scenario_from({**SCENARIO, "engine": {"num_blocks": 300, "block_size": 8}})
    request = replay_requests(scenario)[:1]
    request[0].prompt = 600
    backend = FakeBackend({})
    backend.load(MODELS["micro"], 301, 8)
    with pytest.raises(BadInput, match=r"expected at most 512 tokens \(the model's context\)"):
        replay(backend, replay_arguments(scenario, request, MODELS["micro"], 0))


def test_host_overhead_is_fitted_to_model_calls() -> None:
    def call(k: int, prompts: int, decodes: int) -> ModelCall:
        tokens = prompts * (10 + k % 7)
        host = 0.001 + 0.0002 * (prompts + decodes) + 0.0005 * prompts + 0.00001 * tokens
        return ModelCall(k, k + host, k + 0.5, Shape(prompts, tokens, tokens, 0, 0, decodes, decodes))

    host = fit_overhead(overhead_samples([call(k, k % 3, k % 8) for k in range(90)]))
    assert host.step == pytest.approx(0.001, rel=1e-6)
    assert host.row == pytest.approx(0.0002, rel=1e-6)
    assert host.prompt == pytest.approx(0.0005, rel=1e-6)
    assert host.token == pytest.approx(0.00001, rel=1e-6)
    assert host.seconds(10, 2, 100) == pytest.approx(0.005)
    assert fit_overhead([]) == HostPart()
    assert fit_overhead([(0.1, 4, 0, 0)] * 5) == HostPart(0.1)


@pytest.mark.live
@pytest.mark.parametrize("diverged", [False, True], ids=["same calls", "other calls"])
def test_verify_of_a_replay_prints_what_the_replay_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, diverged: bool
) -> None:
    """Also after the first different call, where the host time of the profile or of the run counts."""
    started = MeasuredCost.__init__

    def start(self: MeasuredCost, *args: Any) -> None:
        started(self, *args)
        self.diverged = diverged

    monkeypatch.setattr(MeasuredCost, "__init__", start)
    file, out = write_scenario(tmp_path, profile="cpu-tiny-kbk"), tmp_path / "out"
    slow = "cost={base: 0.004, prefill_token: 0.0005, decode_row: 0.0004}"
    assert main(["replay", file, "--backend", "fake", "--option", slow, "-o", str(out)]) == 0
    replayed = capsys.readouterr().out.partition("simulated against measured")[2].splitlines()
    assert main(["verify", str(out / "sim"), str(out / "live")]) == 0
    verified = capsys.readouterr().out.splitlines()
    assert len(verified) > 20
    assert replayed[1 : len(verified)] == verified[1:]


ANSWERS = """id,arrival_s,prompt_tokens,output_tokens,n,sequence_tokens
a,0.0,30,12,3,"[12, 5, 9]"
b,0.01,20,6,,
c,0.02,25,4,2,
"""


@pytest.mark.live
def test_each_of_several_answers_is_replayed_as_a_request(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(ANSWERS)
    changes = {"trace": str(tmp_path / "trace.csv"), "workload": None, "policy": {"name": "vllm-v1"}}
    command = ["replay", write_scenario(tmp_path, **changes), "--backend", "fake", "-o", str(tmp_path / "out")]
    assert main([*command, "--check-tokens", "all"]) == 0
    requests = {str(request.id): request.output for request in read_sent(tmp_path / "out" / "live" / "sent.jsonl")}
    assert requests == {"0_a": 12, "1_a": 5, "2_a": 9, "b": 6, "0_c": 4, "1_c": 4}
    live, simulated = (json.loads((tmp_path / "out" / run / "result.json").read_text()) for run in ("live", "sim"))
    assert live["completed"] == simulated["completed"] == 6
    assert live["prefix_cache_hits"] == simulated["prefix_cache_hits"] == 2 * 24 + 24  # whole blocks of 8 tokens
