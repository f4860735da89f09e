"""Calibrate a server over HTTP: known costs are recovered, failed loads are recorded, the rest is kept."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Callable, Optional

import numpy as np
import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from servesim.calibrate.client.load_generator import LoadGenerator, send  # noqa: E402
from servesim.calibrate.client.protocols import Api  # noqa: E402
from servesim.calibrate.endpoint import measure  # noqa: E402
from servesim.calibrate.endpoint.answers import LoadResult, loads_of  # noqa: E402
from servesim.cli import main  # noqa: E402
from servesim.core import Request, Shape  # noqa: E402
from servesim.costs.device_profile import load_profile  # noqa: E402

from ...events import PATIENCE_S, wait_until  # noqa: E402
from ...warm import sim  # noqa: E402
from .endpoints import fake_server, faulty_server, late_sleeps  # noqa: E402

KNOWN = "{base: 0.015, prefill_token: 0.0002, decode_live: 0.0015, context: 0.00001}"
LIVE = "--lengths 16,64,256 --batches 2,6 --bursts 2,4 --output-tokens 14 --rounds 3 -q"
BUSY = 0.2  # delay of a step, as a fraction, with which some loads show no steady steps
SHAPES = {
    Shape(1, 64, 64, 4096): 0.0278,
    Shape(1, 256, 256, 65536): 0.0662,
    Shape(decode_rows=1, decode_live=1, context=100): 0.0175,
    Shape(decode_rows=6, decode_live=6, context=400): 0.028,
}


@pytest.mark.live
@pytest.mark.parametrize(
    ("api", "policy", "options"),
    [
        ("llm-serving", "llm-serving", ("--set", "policy.decode_batch=8")),
        ("openai", "vllm-v1", ("--set", "policy.async_scheduling=false")),  # the fit assumes one step at a time
    ],
    ids=["llm-serving", "openai"],
)
def test_known_costs_of_a_live_server_are_recovered_within_ten_percent(
    api: str, policy: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps take the time of their cost model, but on a busy machine steps and packets are late.

    How late is measured at the same time, with sleeps as long as a step. The costs may differ by 10 % and twice that
    delay, in one of three attempts.
    """
    for attempt in range(3):
        folder = tmp_path / str(attempt) / "known"
        with fake_server(policy, KNOWN, 0, *options) as (url, _), late_sleeps(min(SHAPES.values())) as delays:
            assert main(["calibrate", "endpoint", "--url", url, "--api", api, "-o", str(folder), *LIVE.split()]) == 0
        printed = capsys.readouterr().out
        assert "loads: 24 of 24 succeeded" in printed
        assert "\nverdict: " in printed
        profile, late = load_profile(folder), float(np.quantile(delays, 0.9))
        errors = [abs(profile.cost.seconds(shape) / seconds - 1) for shape, seconds in SHAPES.items()]
        if max(errors) <= 0.1 + 2 * late:
            break
    else:
        pytest.fail(f"errors {errors} with sleeps that are late by {late:.0%}:\n{printed}")
    assert profile.name == "known"
    assert profile.about["how"].startswith("endpoint")
    assert profile.about["grid"]["prefill_tokens"][1] >= 256
    assert set(profile.error) >= {"prefill", "decode"}
    assert 0 <= profile.about["front_end"]["seconds"] < 0.5
    assert len(loads_in(folder)) == 24
    with open(folder / "samples.csv", newline="") as file:
        samples = list(csv.DictReader(file))
    shortest = [float(row["seconds"]) for row in samples if row["load"] == "single 1x16" and row["kind"] == "prefill"]
    assert len(shortest) == 3
    assert sum(row["kind"] == "decode" for row in samples) > 100 or late > BUSY


def give_up_only(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[Sequence[Request]], bool]) -> None:
    """Let only loads that hang time out: on a slow machine, another one takes as long as it takes."""

    def send_with_patience(url: str, api: Api, requests: Sequence[Request], timeout: float) -> LoadGenerator:
        return send(url, api, requests, timeout if hangs(requests) else PATIENCE_S)

    monkeypatch.setattr(measure, "send", send_with_patience)


def calibrate(url: str, folder: Path, *options: str) -> int:
    quick = "--api llm-serving --lengths 16,64,256 --batches 2 --bursts 2 --output-tokens 12 --rounds 2 -q"
    return main(["calibrate", "endpoint", "--url", url, "-o", str(folder), *quick.split(), *options])


def loads_in(folder: Path) -> list[LoadResult]:
    """Return the loads that are complete; another process may be writing them."""
    path = folder / "answers.jsonl"
    return loads_of(map(json.loads, path.read_text().rpartition("\n")[0].splitlines())) if path.exists() else []


def outcomes(folder: Path) -> dict[str, set[Optional[str]]]:
    """Return the outcomes of the requests of every load."""
    loads = loads_in(folder)
    return {f"{load.point.name} #{load.round + 1}": {sent.outcome for sent in load.sent_requests} for load in loads}


@pytest.mark.live
def test_loads_answered_with_500_are_recorded_and_the_rest_is_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def boom(request: web.Request, words: int, number: int) -> Optional[web.StreamResponse]:
        return web.Response(status=500, text="out of memory") if words > 100 else None

    with faulty_server(boom) as url, late_sleeps(0.01) as delays:
        assert calibrate(url, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "failed: single 1x256 #1: refused: HTTP 500: out of memory" in printed
    assert "\nverdict: " in printed
    by_load = outcomes(tmp_path)
    assert by_load["single 1x256 #1"] == by_load["single 1x256 #2"] == {"refused"}
    assert by_load["single 1x64 #2"] == {"finished"}
    profile = load_profile(tmp_path)
    assert profile.about["grid"]["prefill_tokens"][1] < 256
    assert {"load": "single 1x256 #1", "reason": "refused: HTTP 500: out of memory"} in profile.about["loads"]["failed"]
    late = float(np.quantile(delays, 0.9))
    assert 0.0075 < profile.cost.decode(1, 1, 50) < 0.0105 * (1.5 + 2 * late)  # 0.0105 on an idle machine


def test_a_hanging_load_times_out_once_and_the_others_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(request: web.Request, words: int, number: int) -> Optional[web.StreamResponse]:
        if words > 100:
            await asyncio.sleep(600)
        return None

    give_up_only(monkeypatch, lambda requests: any(request.prompt > 100 for request in requests))
    with faulty_server(hang) as url:
        assert calibrate(url, tmp_path, "--timeout", "0.5") == 0
    assert "failed: single 1x256 #1: timed out: no end after 0.5 s" in capsys.readouterr().out
    by_load = outcomes(tmp_path)
    assert by_load["single 1x256 #1"] == {"timed out"}
    assert "single 1x256 #2" not in by_load
    assert by_load["batch 2x64 #2"] == {"finished"}


@pytest.mark.slow
def test_a_server_that_does_not_recover_ends_the_calibration_with_the_results_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    give_up_only(monkeypatch, lambda requests: stuck.is_set() or any(request.prompt > 100 for request in requests))

    async def livelock(request: web.Request, words: int, number: int) -> Optional[web.StreamResponse]:
        """Like llm-serving with a prompt larger than its KV cache: no later request is served."""
        if words > 100:
            stuck.set()
        if stuck.is_set():
            await asyncio.sleep(600)
        return None

    with faulty_server(livelock) as url:
        assert calibrate(url, tmp_path, "--timeout", "3") == 1
    printed = capsys.readouterr().out
    assert "ended early: the server no longer answers since " in printed
    assert "timed out: no end after 3 s" in printed
    assert load_profile(tmp_path).about["loads"]["good"] >= 4


def lasting_port() -> int:
    """Return a free port that no connection of another test gets: below the range from which the system chooses."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    pytest.skip("no free port below 32000")


def kill_later(process: subprocess.Popen[str], folder: Path) -> None:
    """Kill a server once some of its answers have been written."""
    wait_until(lambda: len(loads_in(folder)) >= 4, "four loads")
    process.kill()


@pytest.mark.slow
def test_a_server_that_dies_is_reported_and_resume_finishes_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = lasting_port()
    cost = "{base: 0.01, prefill_token: 0.0001, decode_live: 0.001}"
    with fake_server("vllm-v1", cost, port) as (url, process):
        threading.Thread(target=kill_later, args=(process, tmp_path), daemon=True).start()
        assert calibrate(url, tmp_path, "--timeout", "300") == 1
    assert "ended early: the server no longer answers since " in capsys.readouterr().out
    kept = {name for name, kinds in outcomes(tmp_path).items() if kinds == {"finished"}}
    assert kept
    assert calibrate(url, tmp_path, "--resume") == 2
    assert "--api llm-serving: the server does not answer a request: broken" in capsys.readouterr().err
    with fake_server("vllm-v1", cost, port) as (url, _):
        assert calibrate(url, tmp_path) == 2
        assert "already holds measurements; continue with --resume" in capsys.readouterr().err
        assert calibrate(url, tmp_path, "--resume") == 0
    by_load = outcomes(tmp_path)
    assert kept <= set(by_load)
    assert set.union(*by_load.values()) == {"finished"}
    assert "loads: 12 of 12 succeeded" in capsys.readouterr().out


def test_an_interrupt_keeps_the_measurements(tmp_path: Path) -> None:
    async def never(request: web.Request, words: int, number: int) -> Optional[web.StreamResponse]:
        return None

    with faulty_server(never) as url:
        command = [sim(), "calibrate", "endpoint", "--url", url, "--api", "llm-serving"]
        command += ["-o", str(tmp_path), "--rounds", "50", "-q"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: len(loads_in(tmp_path)) >= 5, "five loads")
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert f"interrupted; --resume -o {tmp_path} continues" in error
    assert "ended early: interrupted" in out
    assert len(loads_in(tmp_path)) >= 5
