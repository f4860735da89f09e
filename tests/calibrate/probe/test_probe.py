"""The probe on the fake backend: samples, failures, interruption and resumption."""

from __future__ import annotations

import ast
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.device.backend import MODELS, Row
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.probe import measure as probe
from servesim.calibrate.probe import session
from servesim.calibrate.probe.grid import grid
from servesim.cli import main
from servesim.core import Shape

from ...conftest import ROOT
from ...events import PATIENCE_S, wait_until
from ...warm import sim
from ..conftest import VirtualTime

SMALL = {"max_rows": 4, "max_tokens": 64, "max_seq_len": 160, "budget": 20.0, "precision": 0.05}
COST = {"base": 1e-4, "prefill_token": 2e-6, "decode_row": 1e-5, "context": 1e-8, "swap_block": 1e-5}


def device(limit: int | None = None) -> FakeBackend:
    backend = FakeBackend(COST, limit=limit)
    backend.load(MODELS["tiny"], 64, 16, 8)
    return backend


def run_probe(backend: Any, **args: Any) -> tuple[list[dict[str, str]], dict[str, Any], list[Any]]:
    reports: list[Any] = []
    result = probe.run(backend, {**SMALL, **args}, reports.append)
    rows = [dict(zip(probe.COLUMNS, map(str, row))) for row in result["rows"]]
    return rows, result, reports


def test_every_kind_of_step_is_measured_with_its_shape(virtual_time: VirtualTime) -> None:
    rows, result, _ = run_probe(device())
    assert set(Counter(row["kind"] for row in rows)) == {"prefill", "decode", "mixed", "swap"}
    assert result["known"] == result["points"]
    mixed = next(row for row in rows if row["kind"] == "mixed")
    assert int(mixed["prefill_tokens"]) > 0
    assert int(mixed["decode_rows"]) > 0
    assert all(float(row["seconds"]) > 0 for row in rows)


def test_samples_have_the_step_time_of_the_device(virtual_time: VirtualTime) -> None:
    rows, _, _ = run_probe(device())
    prompt = [float(r["seconds"]) for r in rows if r["kind"] == "prefill" and r["prefill_tokens"] == "64"]
    assert prompt == pytest.approx([1e-4 + 64 * 2e-6] * len(prompt), rel=0.01)


def test_every_round_has_another_order(virtual_time: VirtualTime) -> None:
    rows, _, _ = run_probe(device())
    rounds = [[row["point"] for row in rows if row["round"] == str(k)] for k in (0, 1)]
    assert sorted(rounds[0]) == sorted(rounds[1])
    assert rounds[0] != rounds[1]


def test_points_that_do_not_fit_fail_and_the_others_are_kept(virtual_time: VirtualTime) -> None:
    rows, result, _ = run_probe(device(limit=40))
    failed = [row for row in rows if row["failed"]]
    assert len(failed) == len(result["failed"]) > 0
    assert all("40" in row["failed"] and row["seconds"] == "" for row in failed)
    assert all(int(row["prefill_tokens"]) + int(row["decode_rows"]) > 40 for row in failed)
    assert result["known"] == result["points"]


class Broken(FakeBackend):
    """A backend that fails at some shapes, or after some steps."""

    def __init__(self, after: int | None = None) -> None:
        super().__init__(COST)
        self.steps = 0
        self.after = after

    def step(self, rows: Sequence[Row]) -> list[int]:
        self.steps += 1
        if (self.after is None and len(rows) == 3) or (self.after is not None and self.steps > self.after):
            raise RuntimeError("kernel launch\nfailed")
        return super().step(rows)


def test_an_error_fails_only_its_point(virtual_time: VirtualTime) -> None:
    backend = Broken()
    backend.load(MODELS["tiny"], 64, 16, 8)
    rows, result, _ = run_probe(backend)
    assert {row["failed"] for row in rows} == {"", "RuntimeError: kernel launch failed"}
    assert 0 < len(result["failed"]) < result["points"]


def test_a_lost_device_ends_the_probe_with_its_error(virtual_time: VirtualTime) -> None:
    backend = Broken(after=60)
    backend.load(MODELS["tiny"], 64, 16, 8)
    with pytest.raises(
        RuntimeError, match="12 points failed in a row, the last with: RuntimeError: kernel launch failed"
    ):
        run_probe(backend)


def test_samples_are_reported_at_once_and_survive_an_interruption(
    virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "REPORT_INTERVAL_S", 0.01)
    reports: list[Any] = []

    def emit(report: Any) -> None:
        reports.append(report)
        if len(reports) == 3:
            raise KeyboardInterrupt

    result = probe.run(device(), dict(SMALL), emit)
    assert result["interrupted"]
    kept = [row for report in reports for row in report["rows"]]
    assert [row[-5] for row in result["rows"][: len(kept)]] == [row[-5] for row in kept]  # the points, in order


def test_known_points_are_not_measured_again(virtual_time: VirtualTime) -> None:
    rows, first, _ = run_probe(device())
    again, second, _ = run_probe(device(), resume=rows)
    assert len(again) == len(rows)
    half = [row for row in rows if int(row["point"]) % 2]
    more, third, _ = run_probe(device(), resume=half)
    assert {int(row["point"]) % 2 for row in more[len(half) :]} == {0}
    assert first["known"] == second["known"] == third["known"]


class Unsteady(FakeBackend):
    """A backend whose steps take different times, so that no point is ever precise."""

    def step(self, rows: Sequence[Row]) -> list[int]:
        time.sleep(random.random() * 1e-3)
        return super().step(rows)


def test_the_probe_ends_after_its_budget(virtual_time: VirtualTime) -> None:
    backend = Unsteady(COST)
    backend.load(MODELS["tiny"], 64, 16, 8)
    _, result, _ = run_probe(backend, budget=0.2, precision=1e-9)
    assert 0.2 <= virtual_time.now < 0.25
    assert result["known"] < result["points"]


def test_slow_samples_are_flagged_and_kept() -> None:
    session = probe.Probe(device(), dict(SMALL), lambda report: None)
    for seconds in (1.0, 1.0, 1.0, 1.6):
        session.rows.append({"point": 0, "seconds": seconds, "failed": "", "flagged": ""})
        session._add_sample(0, seconds)
    session.flag()
    assert [row["flagged"] for row in session.rows] == ["", "", "", "outlier"]


def test_the_grid_stays_within_its_bounds() -> None:
    for point in grid(12, 300, 200, 4):
        assert point.rows + point.decoding <= 12
        assert point.rows * point.tokens <= 300
        assert max(point.tokens + point.cached, point.context) <= 200
        assert point.blocks <= 4


@pytest.mark.parametrize(
    "name",
    ["device/standalone", "device/backend", "device/fake", "device/worker", "probe/grid", "probe/measure",
     "probe/samples"],
)  # fmt: skip
def test_worker_modules_need_only_python_3_9(name: str) -> None:
    tree = ast.parse((ROOT / "calibrate" / f"{name}.py").read_text(encoding="utf-8"), feature_version=(3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(module).split(".")[0] for module in modules} <= set(sys.stdlib_module_names) | {"numpy", "servesim"}


COMMAND = ["calibrate", "probe", "--backend", "fake", "--model", "tiny", "--num-blocks", "64"]
COMMAND += ["--host-blocks", "4", "-q"]
GRID = ["--max-rows", "8", "--max-tokens", "64", "--max-seq-len", "200"]


def test_the_command_measures_fits_and_resumes(
    device_here: VirtualTime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main([*COMMAND, *GRID, "--budget", "1", "-o", str(folder)]) == 0
    assert "held-out error  decode" in capsys.readouterr().out
    before = (folder / "samples.csv").read_text(encoding="utf-8").count("\n")
    assert main([*COMMAND, *GRID, "--budget", "0.2", "--no-fit", "-o", str(folder)]) == 0
    assert (folder / "samples.csv").read_text(encoding="utf-8").count("\n") >= before
    header = (folder / "samples.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert set(Shape._fields) < set(header)


def test_ctrl_c_keeps_the_samples(tmp_path: Path) -> None:
    command = [sim(), *COMMAND, *GRID, "--budget", "3600", "--precision", "1e-9", "-o", str(tmp_path)]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    samples = tmp_path / "samples.csv"
    wait_until(lambda: samples.exists() and samples.stat().st_size > 5000, "samples")
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 130
    assert "interrupted" in errors
    assert samples.read_text(encoding="utf-8").count("\n") > 20


def test_standalone_probe_without_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("calibrate", "sim", "policies", "traces"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "profiles"))
    script = str(tmp_path / "calibrate" / "device" / "standalone.py")
    command = [sys.executable, "-I", script, "--backend", "fake", *GRID, "--budget", "1", "-o", str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "points precise, 0 failed" in ran.stdout
    other = subprocess.run([*command, "--seed", "1", "-o", str(tmp_path / "out")], capture_output=True, text=True)
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr == f"{tmp_path / 'out'}: was probed with seed 0, now 1; use another folder\n"
    main(["calibrate", "fit", str(tmp_path / "out")])  # it reads the samples; their times are those of a busy machine
    assert re.search("held-out error  decode|: the (total|fitted) time of", "".join(capsys.readouterr()))


def report(**changes: Any) -> dict[str, Any]:
    return {"known": 0, "points": 50, "samples": 7, "failed": 0, "seconds": 30.0, "left": 90.0, **changes}


def test_the_line_has_the_fraction_of_the_time_or_of_the_points() -> None:
    assert session.describe(report()) == "probe: 25 %, 0/50 points precise, 7 samples, at most 90 s left"
    assert session.describe(report(known=40, failed=2)).startswith("probe: 80 %, 40/50 points precise, 7 samples, 2 ")
    assert session.describe(report(seconds=130.0, left=0.0)).startswith("probe: 100 %")


class Terminal(StringIO):
    """A terminal for the line of the command."""

    def isatty(self) -> bool:
        return True


def test_the_line_changes_on_a_terminal(
    device_here: VirtualTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "140")
    assert (
        main([*COMMAND[:-1], *GRID, "--budget", "4", "--precision", "1e-9", "--no-fit", "-o", str(tmp_path / "out")])
        == 0
    )
    shown = [int(number) for number in re.findall(r"\rprobe: +(\d+) %,", terminal.getvalue())]
    assert len(set(shown)) >= 3 and shown == sorted(shown)
