"""vLLM's log with step times: shapes, the host time that its timer leaves out, and the profile."""

from __future__ import annotations

import gzip
import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Optional

import numpy as np
import pytest
import yaml
from servesim.calibrate.imports.step_log import TimedStep
from servesim.calibrate.imports.vllm_log import read_vllm_log
from servesim.cli import main
from servesim.core import BadInput, Shape
from servesim.costs.device_profile import load_profile

from ...conftest import RECORDINGS

ITERATIONS, TOKEN_TIMES = RECORDINGS / "vllm-log" / "iterations.log.gz", RECORDINGS / "vllm-log" / "token_times.json.gz"
SHORT_LOG = """\
INFO 01-02 15:04:05 [core.py:99] Iteration(0): 2 context requests, 300 context tokens, 0 generation requests, \
0 generation tokens, iteration elapsed time: 31.50 ms
INFO 01-02 15:04:05 [loggers.py:9] Engine 000: Avg prompt throughput: 10.0 tokens/s
INFO 01-02 15:04:05 [core.py:99] Iteration(1): 1 context requests, 20 context tokens, 2 generation requests, \
2 generation tokens, iteration elapsed time: 9.25 ms
INFO 01-02 15:04:05 [core.py:99] Iteration(2): 0 context requests, 0 context tokens, 0 generation requests, \
0 generation tokens, iteration elapsed time: 9.25 ms (dummy)
"""
HOST_STEP, HOST_ROW = 0.0015, 0.00016  # seconds that the timer leaves out


def line(number: int, prompts: int, tokens: int, rows: int, generated: int, elapsed_ms: float) -> str:
    return (
        f"Iteration({number}): {prompts} context requests, {tokens} context tokens, {rows} generation requests, "
        f"{generated} generation tokens, iteration elapsed time: {elapsed_ms:.2f} ms, CPU KV cache usage: 1.0%"
    )


def busy_log(digits: Optional[int], seconds: float = 40.0, pause: float = 0.0, between: int = 500) -> str:
    """Return the log of a server with 1 to 32 decodes per step, and a prompt in every 9th step.

    `digits`: of the fraction of a second in a time stamp; None writes no stamps. After `between` steps, the server
    waits for a request.
    """
    now, number, lines, rng = 35_990.0, 0, [], np.random.default_rng(1)
    while now < 35_990.0 + seconds:
        rows, tokens = 1 + number // 7 % 32, 200 if number % 9 == 0 else 0
        if pause and number % between == 0:
            now, rows, tokens = now + pause, 0, 200
        elapsed = 0.008 + 0.0008 * rows + 5e-5 * tokens
        now += (elapsed + HOST_STEP + HOST_ROW * (rows + bool(tokens))) * rng.uniform(0.98, 1.02)
        stamp = f"{datetime(2000, 11, 16) + timedelta(seconds=now):%m-%d %H:%M:%S.%f}"[: 15 + digits if digits else 14]
        start = "" if digits is None else f"(APIServer pid=7) INFO {stamp} [loggers.py:199] Engine 000: "
        lines.append(start + line(number, int(tokens > 0), tokens, rows, rows, 1e3 * elapsed))
        number += 1
    return "\n".join(lines)


def test_a_vllm_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(SHORT_LOG, encoding="utf-8")
    log = read_vllm_log(tmp_path / "server.log", mean_context=150.0)
    assert log.steps == [
        TimedStep(Shape(2, 300, 300, 45_000), pytest.approx(0.0315)),
        TimedStep(Shape(1, 20, 20, 400, 0, 2, 2, 300), pytest.approx(0.00925)),
    ]
    assert log.host is None
    times = [0.03, 0.02, 25.0, 0.03, 24.0, 0.03, 25.0, 26.0, 0.02, 25.0]
    (tmp_path / "server.log").write_text("\n".join(line(7, 0, 0, 2, 2, time) for time in times), encoding="utf-8")
    with pytest.raises(BadInput, match="log with --no-async-scheduling"):
        read_vllm_log(tmp_path / "server.log")
    (tmp_path / "server.log").write_text("INFO ready\n", encoding="utf-8")
    with pytest.raises(BadInput, match="--enable-logging-iteration-details, got none"):
        read_vllm_log(tmp_path / "server.log")


@pytest.mark.parametrize(("digits", "pause"), [(0, 0.0), (0, 0.7), (3, 0.0), (3, 0.7)])
def test_the_time_stamps_show_the_host_time(digits: int, pause: float, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(busy_log(digits, pause=pause), encoding="utf-8")
    log = read_vllm_log(tmp_path / "server.log")
    assert log.host is not None
    for rows in (1, 16, 32):
        assert log.host.seconds(rows) == pytest.approx(HOST_STEP + HOST_ROW * rows, rel=0.15)
        steps = [step.seconds for step in log.steps if step.shape.decode_rows == rows and not step.shape.prefill_rows]
        assert np.median(steps) == pytest.approx(0.008 + 0.0008 * rows + HOST_STEP + HOST_ROW * rows, rel=0.02)


def test_short_busy_stretches_do_not_show_the_host_time(tmp_path: Path) -> None:
    """Every stretch takes less than 3 s. Those with two changes of the stamp are the slow ones: a biased selection."""
    (tmp_path / "server.log").write_text(busy_log(0, pause=0.7, between=100), encoding="utf-8")
    assert read_vllm_log(tmp_path / "server.log").host is None


def test_a_log_without_stamps_gives_a_profile_for_ranking_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, digits in (("stamped", 0), ("bare", None)):
        (tmp_path / f"{name}.log").write_text(busy_log(digits), encoding="utf-8")
        assert main(["calibrate", "import", "vllm-log", str(tmp_path / f"{name}.log"), "-o", str(tmp_path / name)]) == 0
        out = capsys.readouterr().out
        assert ("verdict: usable" in out) == (name == "stamped")
        assert ("verdict: for ranking only" in out and "host time is missing" in out) == (name == "bare")
        assert ("sim calibrate endpoint, or sim calibrate logs" in out) == (name == "bare")
    shape = Shape(decode_rows=16, decode_live=16)
    with_host, without = (load_profile(tmp_path / name).cost.seconds(shape) for name in ("stamped", "bare"))
    assert with_host - without == pytest.approx(HOST_STEP + 16 * HOST_ROW, rel=0.2)
    how = load_profile(tmp_path / "stamped").about["how"]
    assert "ms per step and" in how and "from the time stamps of the log" in how


def test_a_step_after_a_preemption_computes_a_prompt(tmp_path: Path) -> None:
    """11 requests and 110 tokens: 10 requests decode one token, the other one computes 100 tokens again."""
    text = [line(0, 0, 0, 11, 110, 54.0), line(1, 2, 64, 11, 331, 113.0), line(2, 0, 0, 1, 90, 54.0)]
    (tmp_path / "server.log").write_text("\n".join(text), encoding="utf-8")
    shapes = [step.shape for step in read_vllm_log(tmp_path / "server.log", 50.0).steps]
    assert shapes[0] == Shape(1, 100, 100, 10_000, 0, 10, 10, 500)
    assert shapes[1] == Shape(3, 385, 385, 2 * 32**2 + 321**2, 0, 10, 10, 500)
    assert shapes[2] == Shape(1, 90, 90, 8100)


def test_the_recorded_log_of_a_real_server_agrees_with_its_client(tmp_path: Path) -> None:
    """The client measured the steps from outside, with their host time."""
    lines = gzip.decompress(ITERATIONS.read_bytes()).decode().splitlines()
    (tmp_path / "one.log").write_text("\n".join(lines[:600]), encoding="utf-8")
    tokens = json.loads(gzip.decompress(TOKEN_TIMES.read_bytes()))
    log = read_vllm_log(tmp_path / "one.log")
    assert len(log.steps) == len(tokens) == 600 and log.host is not None
    total, measured = sum(step.seconds for step in log.steps[1:]), tokens[-1] - tokens[0]
    assert total == pytest.approx(measured, rel=0.02)
    assert total - 599 * log.host.seconds(1) < 0.94 * measured


def test_resumed_requests_of_a_real_server_are_prompts() -> None:
    log = read_vllm_log(ITERATIONS)
    assert len(log.steps) == 1420
    assert [step.shape.prefill_tokens for step in log.steps[900:902]] == [289, 577]
    decodes = [step for step in log.steps if not step.shape.prefill_rows]
    typical = {rows: np.median([s.seconds for s in decodes if s.shape.decode_rows == rows]) for rows in range(1, 9)}
    assert all(step.seconds < 8 * typical[step.shape.decode_rows] for step in decodes if step.shape.decode_rows < 9)


def test_two_engines_in_one_log_have_their_own_steps(tmp_path: Path) -> None:
    """The lines of data-parallel engines alternate; each engine counts its own iterations."""
    one = busy_log(3, 20.0).splitlines()
    two = [text.replace("Engine 000", "Engine 001") for text in one]
    (tmp_path / "server.log").write_text("\n".join(text for pair in zip(one, two) for text in pair), encoding="utf-8")
    log = read_vllm_log(tmp_path / "server.log")
    assert log.host is not None and len(log.steps) == 2 * len(one)
    assert log.host.seconds(8) == pytest.approx(HOST_STEP + HOST_ROW * 8, rel=0.15)


def test_the_sizes_of_any_model_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = {**sizes, "intermediate_size": 28672, "vocab_size": 128256}
    (tmp_path / "llama-70b").mkdir()
    (tmp_path / "llama-70b" / "config.json").write_text(json.dumps(config))
    (tmp_path / "server.log").write_text(busy_log(0), encoding="utf-8")
    command = ["calibrate", "import", "vllm-log", str(tmp_path / "server.log"), "--mean-context", "100"]
    assert main([*command, "--model", str(tmp_path / "llama-70b"), "-o", str(tmp_path / "out")]) == 0
    about = yaml.safe_load((tmp_path / "out" / "profile.yaml").read_text())
    assert about["model"] == {
        "name": "llama-70b", "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "intermediate": 28672,
        "vocab": 128256,
    }  # fmt: skip
    capsys.readouterr()
    assert main(["calibrate", "check", str(tmp_path / "out")]) == 0
    assert "\n  model: llama-70b\n" in capsys.readouterr().out
    assert any("sizes of llama-70b" in reason for reason in about["tied"].values())
    assert not any("Llama-2-7B" in reason for reason in about["tied"].values())
    (tmp_path / "llama-70b" / "config.json").write_text(json.dumps({**config, "hidden_size": "big"}))
    capsys.readouterr()
    assert main([*command, "--model", str(tmp_path / "llama-70b"), "-o", str(tmp_path / "again")]) == 2
    assert "config.json: hidden_size: expected a positive whole number, got 'big'" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
