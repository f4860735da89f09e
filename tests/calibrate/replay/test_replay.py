"""Replays: on a fake device simulated and live agree, whatever the policy; stops, refusals and files."""

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
from servesim.calibrate.device.fake import Fake
from servesim.calibrate.live.driver import replay
from servesim.calibrate.live.setup import arguments, same_device
from servesim.calibrate.probe.host_overhead import Host, host_of, parts_of
from servesim.calibrate.replay.replay import as_run, requests_of
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Shape
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.engine.step import ModelCall
from servesim.runs.run_folder import read_sent, read_steps

pytestmark = pytest.mark.live

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


def written(folder: Path, **changes: Any) -> str:
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, **changes}))
    return str(file)


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "llm-serving", "decode_batch": 8},
        {"name": "llm-serving", "decode_batch": 8, "delay_factor": 0.5, "delay_variant": "queue", "evicted": "swapped"},
        {"name": "vllm", "preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 8},
        {"name": "sarathi", "chunk_size": 16},
    ],
    ids=["stock", "delay and swapped queue", "swap", "chunked"],
)
def test_on_a_fake_device_every_figure_agrees_within_a_percent_and_decisions_are_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: dict[str, Any]
) -> None:
    metrics = ["makespan", "request_throughput", "output_throughput", "evictions", "model_calls"]
    metrics += [f"{k}_{n}_ms" for n in ("ttft", "tpot", "itl", "e2el") for k in ("mean", "median", "p90", "p99")]
    file = written(tmp_path, policy=policy)
    command = ["replay", file, "--backend", "fake", "--tolerance", "1%", "--metrics", *metrics, "-o", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "decisions: identical" in out
    assert "tolerance 1 %: met" in out
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report["settings"][0]["decisions"]["identical"] is True
    live = json.loads((tmp_path / "live" / "result.json").read_text())
    assert live["completed"] == 24
    assert live["blocks_left"] == live["blocks"]
    assert {path.name for path in (tmp_path / "live").iterdir()} == {
        "manifest.json", "result.json", "requests.csv", "decisions.jsonl.gz", "steps.csv", "sent.jsonl",
    }  # fmt: skip


def test_on_the_wall_clock_the_measured_step_times_explain_the_whole_run(tmp_path: Path) -> None:
    from servesim.calibrate.replay.live_run import live_run
    from servesim.calibrate.replay.resimulate import resimulate
    from servesim.calibrate.replay.verify import compare
    from servesim.runs.run_folder import run_data

    scenario = as_run(scenario_from(SCENARIO))
    requests = requests_of(scenario)
    backend = Fake({"base": 0.002, "prefill_token": 5e-5, "decode_row": 1e-4})
    backend.load(MODELS["tiny"], 31, 8, 30)
    told = json.loads(json.dumps(replay(backend, arguments(scenario, requests, MODELS["tiny"], warm_up=8))))
    profile = Profile("none", LinearCost(base=0.002))
    measured = run_data(run := live_run(scenario, profile, requests, told), run.decisions)
    again, followed = resimulate(measured, profile)
    assert followed == len(told["calls"])
    found = compare(again, measured)
    assert found.decisions is not None
    assert found.decisions.identical
    assert all(abs(line.error or 0.0) < 1e-9 for line in found.lines)
    assert 0 < sum(told["host"]) < 0.01


def test_a_burst_on_torch_is_decided_as_simulated() -> None:
    pytest.importorskip("torch")
    from servesim.calibrate.live.setup import Stage
    from servesim.calibrate.replay.replay import replay_on
    from servesim.core import Request

    policy = {"name": "vllm", "preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 6}
    engine = {"num_blocks": 12, "block_size": 8, "host_blocks": 12}
    scenario = scenario_from({"policy": policy, "engine": engine})
    requests = [Request(id, 0.0, 9 + 3 * id, 8) for id in range(6)]
    with Stage("torch", "micro", options={"device": "cpu"}) as stage:
        stage.load([scenario])
        replayed = replay_on(stage, "burst", scenario, requests, Profile("crude", LinearCost(base=0.01)), warm_up=2)
    found = replayed.comparison
    assert found is not None
    assert found.decisions is not None
    assert found.decisions.identical
    assert found.followed == (replayed.live.calls, replayed.live.calls)
    assert found.line("evictions").measured == found.line("evictions").simulated
    assert (found.line("evictions").measured or 0) > 0
    assert replayed.live.extra["blocks_left"] == replayed.live.extra["blocks"] == 12


def test_equal_seeds_give_equal_answers_whatever_the_schedule() -> None:
    stories = []
    for policy in ({"name": "llm-serving", "decode_batch": 3}, {"name": "sarathi", "chunk_size": 9}):
        scenario = as_run(scenario_from({**SCENARIO, "policy": policy}))
        backend = Tell({})
        backend.load(MODELS["tiny"], 31, 8, 30)
        replay(backend, arguments(scenario, requests_of(scenario, time_scale=0.01), MODELS["tiny"], 0))
        stories.append(backend.told)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 50


class Tell(Fake):
    """A fake device that notes each cached context and the token it wrote behind it."""

    told: set[tuple[tuple[int, ...], int]]

    def step(self, rows: Any) -> list[int]:
        self.told = getattr(self, "told", set())
        tokens = super().step(rows)
        for row, token in zip(rows, tokens):
            end = row.position + len(row.tokens)
            if row.position >= 40:  # deep inside an answer: no chunk ends there under one policy alone
                held = self.cache[list(row.table)].ravel()[:end]
                self.told.add((tuple(held.tolist()), token))
        return tokens


def test_a_replay_stops_on_ctrl_c_with_the_results_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        while "until_interrupted" not in getattr(signal.getsignal(signal.SIGINT), "__qualname__", ""):
            time.sleep(0.05)
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGINT)

    workload = {**SCENARIO["workload"], "requests": 400, "arrivals": {"kind": "poisson", "rate": 10}}
    threading.Thread(target=interrupt, daemon=True).start()
    command = ["replay", written(tmp_path, workload=workload), "--backend", "fake", "-o", str(tmp_path / "out")]
    assert main(command) == 130
    assert "stopped early" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "live" / "result.json").read_text())
    assert result["stopped"] is True
    assert 0 < result["completed"] < 400
    assert result["outcomes"]["unfinished"] + result["completed"] == 400


def test_time_scale_and_limit_shape_what_is_sent(tmp_path: Path) -> None:
    assert main(["replay", written(tmp_path), "--backend", "fake", "--limit", "5", "--time-scale", "0.5",
                 "-o", str(tmp_path)]) == 0  # fmt: skip
    sent = read_sent(tmp_path / "live" / "sent.jsonl")
    full = requests_of(scenario_from(SCENARIO))
    assert [request.arrival for request in sent] == [request.arrival * 0.5 for request in full[:5]]
    assert len(read_steps(tmp_path / "live" / "steps.csv")) > 5


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "expected one of --backend and --url"),
        (["--backend", "fake", "--limit", "0"], "--limit: expected at least 1"),
        (["--backend", "fake", "--time-scale", "0"], "--time-scale: expected a positive number"),
        (["--backend", "fake", "--metrics", "speed"], "metric 'speed': not compared; known: makespan"),
        (["--backend", "torch", "--model", "gpt"], "model 'gpt': expected one of llama2-7b"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    assert main(["replay", written(tmp_path), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert complaint in error
    assert "\n" not in error


def test_a_profile_of_another_device_or_kernel_set_is_refused() -> None:
    about = {"device": "NVIDIA H200", "kernels": "fused", "dtype": "bfloat16", "model": "llama2-7b"}
    same_device(Profile("mine", LinearCost(), about), about)
    same_device(Profile("inline", LinearCost()), about)
    for key, other in (("device", "Ascend 910B4"), ("kernels", "reference"), ("model", {"name": "tiny"})):
        with pytest.raises(BadInput, match=f"measured with {key}"):
            same_device(Profile("other", LinearCost(), {**about, key: other}), about)


def test_requests_longer_than_the_model_are_refused() -> None:
    scenario = scenario_from({**SCENARIO, "engine": {"num_blocks": 300, "block_size": 8}})
    request = requests_of(scenario)[:1]
    request[0].prompt = 600
    backend = Fake({})
    backend.load(MODELS["micro"], 301, 8)
    with pytest.raises(BadInput, match="the model is built for 512"):
        replay(backend, arguments(scenario, request, MODELS["micro"], 0))


def test_the_hosts_part_is_read_off_its_calls() -> None:
    def call(k: int, prompts: int, decodes: int) -> ModelCall:
        tokens = prompts * (10 + k % 7)
        host = 0.001 + 0.0002 * (prompts + decodes) + 0.0005 * prompts + 0.00001 * tokens
        return ModelCall(k, k + host, k + 0.5, Shape(prompts, tokens, 0, 0, 0, decodes, decodes))

    host = host_of(parts_of([call(k, k % 3, k % 8) for k in range(90)]))
    assert host.step == pytest.approx(0.001, rel=1e-6)
    assert host.row == pytest.approx(0.0002, rel=1e-6)
    assert host.prompt == pytest.approx(0.0005, rel=1e-6)
    assert host.token == pytest.approx(0.00001, rel=1e-6)
    assert host.seconds(10, 2, 100) == pytest.approx(0.005)
    assert host_of([]) == Host()
    assert host_of([(0.1, 4, 0, 0)] * 5) == Host(0.1)
