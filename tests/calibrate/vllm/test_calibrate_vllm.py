"""`sim calibrate vllm` by command, with a stand-in for vLLM: the files, the table, and its faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.imports.step_log import read_step_log
from servesim.calibrate.vllm.loads import LoadClient, LoadFailed
from servesim.cli import main
from servesim.config.layers import read_scenario_file
from servesim.core import Shape
from servesim.costs.device_profile import load_profile

from ...events import wait_until

STANDIN = Path(__file__).with_name("vllm_standin.py")
DECODE = Shape(decode_rows=4, decode_live=4, context=400)
QUICK = ["--seconds", "2", "--prompt-tokens", "100", "--output-tokens", "12"]


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `vllm` that this interpreter imports."""
    package = tmp_path / "packages" / "vllm"
    (package / "entrypoints" / "openai").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.32.0+cpu'\n", encoding="utf-8")
    shutil.copy(STANDIN, package / "entrypoints" / "openai" / "api_server.py")
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("SERVESIM_VLLM_PYTHON", raising=False)
    return package


def has_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for_end_of_child(log: Path) -> None:
    """Wait for the end of the child process of the server, whose number is in its log."""
    found = re.search(r"child (\d+)", log.read_text(encoding="utf-8"))
    assert found is not None
    wait_until(lambda: has_ended(found[1]), "the end of the child of the server")


@pytest.mark.slow
def test_a_server_gives_a_profile_a_scenario_and_a_table(
    vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["calibrate", "vllm", *QUICK, "-q", "-o", str(out), "--", "sleeps"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\*mean_ttft_ms +\d", printed, re.MULTILINE)
    scenario = read_scenario_file(out / "scenario.yaml")
    assert scenario["engine"] == {"num_blocks": 4096, "block_size": 16, "max_model_len": 1024}
    assert scenario["policy"]["version"] == "0.32.0" and scenario["policy"]["max_num_seqs"] == 64
    profile = load_profile(out / "profile")
    steps = read_step_log(out / "steps.jsonl")
    assert profile.cost.duration(DECODE) == pytest.approx(np.median(steps.seconds[steps.kinds == "decode"]), rel=0.5)
    assert profile.front_end[0] > 0
    assert profile.about["server"]["command"] == ["sleeps"]
    assert "verdict: " in printed
    assert (out / "report.html").exists() and (out / "verify.json").exists()
    wait_for_end_of_child(out / "server.log")


@pytest.mark.slow
def test_a_calibration_is_resumed_and_checked_again_with_one_verdict(
    vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, sent, broken = Path("out"), list[str](), ["burst of 32"]
    send = LoadClient.send

    def send_or_fail(client: LoadClient, name: str, requests: Any) -> Any:
        sent.append(name)
        if name in broken:
            broken.remove(name)
            raise LoadFailed(f"{name}: broken")
        return send(client, name, requests)

    monkeypatch.setattr(LoadClient, "send", send_or_fail)
    command = ["calibrate", "vllm", *QUICK, "-q", "-o", str(out)]
    assert main([*command, "--", "sleeps"]) == 1
    error = capsys.readouterr().err
    assert "recorded steps are kept in" in error and "with --resume sends only the loads" in error
    assert main([*command, "--", "sleeps"]) == 2
    assert "already holds the loads of a calibration; continue with --resume" in capsys.readouterr().err
    assert [json.loads(line)["load"] for line in (out / "loads.jsonl").read_text().splitlines()] == ["single requests"]
    with (out / "loads.jsonl").open("a") as file:
        file.write('{"load": "bur')  # a kill while the line was written
    sent.clear()
    assert main([*command, "--resume", "--", "sleeps"]) == 0
    assert sent[:4] == ["first request", "warm-up", "equal requests", "burst of 8"]  # not the single requests
    verdict = re.search(r"^verdict: .*", capsys.readouterr().out, re.MULTILINE)
    assert (out / "steps.jsonl").exists() and (out / "steps-2.jsonl").exists()
    sent.clear()
    assert main(["calibrate", "check", str(out / "profile")]) == 0
    assert verdict is not None and verdict[0] in capsys.readouterr().out
    monkeypatch.chdir(tmp_path.parent)  # the files of a calibration are found from every folder
    assert main([*command[:-1], str(tmp_path / "out"), "--check-only", "--", "sleeps"]) == 0
    assert sent == ["first request", "warm-up", "equal requests"]
    assert (tmp_path / "out" / "check-2" / "verify.json").exists()


@pytest.mark.slow
def test_a_server_of_the_user_is_calibrated_and_still_runs(
    vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, out = tmp_path / "steps.jsonl", tmp_path / "out"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(STANDIN), "--model", "sleeps", "--port", str(port)]
    server = subprocess.Popen(
        command, env={**os.environ, "SERVESIM_STEPS": str(steps)}, stdout=subprocess.PIPE, text=True
    )
    try:
        child = server.stdout.readline().split()[1]
        wait_until(lambda: steps.exists() and steps.stat().st_size, "the file of the steps")
        url = ["--url", f"http://127.0.0.1:{port}/v1", "--steps", str(steps)]
        assert main(["calibrate", "vllm", *QUICK, "-o", str(out), *url, "--json"]) == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["comparisons"][0]["metrics"]["mean_tpot_ms"]["measured"] > 4
        assert "sim: vLLM 0.32.0, sleeps, 4,097 KV blocks; the loads take about 1 min" in said.err
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()
        subprocess.run(["kill", child], check=False)
    assert main(["calibrate", "vllm", "-q", "-o", str(tmp_path / "again"), *url]) == 1
    error = capsys.readouterr().err
    assert "cannot list the models" in error and "recorded steps are kept in" in error and error.count("\n") == 1


def test_a_server_that_is_killed_keeps_the_steps(
    vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["calibrate", "vllm", "-q", "-o", str(out), "--", "killed"]) == 1
    error = capsys.readouterr().err
    steps = out / "steps.jsonl"
    assert re.fullmatch(r"sim: vLLM ended, killed by SIGKILL; log: \S+; 22 recorded steps are kept in .*\n", error), (
        error
    )
    assert len(steps.read_text(encoding="utf-8").splitlines()) == 1 + 22  # requests of 16 and 6 tokens
    wait_for_end_of_child(out / "server.log")
    assert len(read_step_log(steps)) == 22


def test_a_killed_command_leaves_no_server(vllm: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "servesim", "calibrate", "vllm", "-q", "-o", str(out), "--", "sleeps"]
    process = subprocess.Popen(command)
    wait_until((out / "steps.jsonl").exists, "the file of the steps")
    server = re.search(r"child (\d+)", (out / "server.log").read_text(encoding="utf-8"))
    parent = int(Path(f"/proc/{server[1]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    process.kill()
    process.wait()
    try:
        wait_until(lambda: not Path(f"/proc/{parent}").exists(), "the end of the server")
    finally:
        subprocess.run(["kill", server[1]], check=False)  # of the stand-in; vLLM's own children end with it
