"""The probe on a device made of sleep: what it measures, what it keeps, and how it goes on."""

from __future__ import annotations

import argparse
import ast
import csv
import io
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.device.backend import MODELS, Row
from servesim.calibrate.device.fake import Fake
from servesim.calibrate.probe import measure as probe
from servesim.calibrate.probe.grid import grid
from servesim.cli import main
from servesim.core import Shape

from ...conftest import ROOT

pytestmark = pytest.mark.live

SMALL = {"most_rows": 4, "most_tokens": 64, "longest": 160, "budget": 20.0, "precision": 0.05}
COST = {"base": 1e-4, "prefill_token": 2e-6, "decode_row": 1e-5, "context": 1e-8, "swap_block": 1e-5}


def device(limit: int | None = None) -> Fake:
    backend = Fake(COST, limit=limit)
    backend.load(MODELS["tiny"], 64, 16, 8)
    return backend


def measured(backend: Any, **args: Any) -> tuple[list[dict[str, str]], dict[str, Any], list[Any]]:
    told: list[Any] = []
    result = probe.run(backend, {**SMALL, **args}, told.append)
    return list(csv.DictReader(io.StringIO(result["csv"]))), result, told


def test_every_kind_of_step_is_measured_and_told_by_its_shape() -> None:
    rows, result, _ = measured(device())
    assert set(Counter(row["kind"] for row in rows)) == {"prefill", "decode", "mixed", "swap", "busy"}
    assert result["known"] == result["points"]
    mixed = next(row for row in rows if row["kind"] == "mixed")
    assert int(mixed["prefill_tokens"]) > 0
    assert int(mixed["decode_rows"]) > 0
    assert all(float(row["seconds"]) > 0 for row in rows)


def test_a_sample_takes_what_the_device_takes() -> None:
    rows, _, _ = measured(device())
    prompt = [float(r["seconds"]) for r in rows if r["kind"] == "prefill" and r["prefill_tokens"] == "64"]
    assert sorted(prompt)[len(prompt) // 2] == pytest.approx(1e-4 + 64 * 2e-6, rel=0.3)


def test_shapes_come_in_another_order_every_round() -> None:
    rows, _, _ = measured(device())
    rounds = [[row["point"] for row in rows if row["round"] == str(k)] for k in (0, 1)]
    assert sorted(rounds[0]) == sorted(rounds[1])
    assert rounds[0] != rounds[1]


def test_points_that_do_not_fit_are_failed_and_the_rest_is_kept() -> None:
    rows, result, _ = measured(device(limit=40))
    failed = [row for row in rows if row["failed"]]
    assert len(failed) == len(result["failed"]) > 0
    assert all("40" in row["failed"] and row["seconds"] == "" for row in failed)
    assert all(int(row["prefill_tokens"]) + int(row["decode_rows"]) > 40 for row in failed)
    assert result["known"] == result["points"]


class Broken(Fake):
    """A device that fails at some shapes, or from some step on."""

    def __init__(self, after: int | None = None) -> None:
        super().__init__(COST)
        self.steps = 0
        self.after = after

    def step(self, rows: Sequence[Row]) -> list[int]:
        self.steps += 1
        if (self.after is None and len(rows) == 3) or (self.after is not None and self.steps > self.after):
            raise RuntimeError("kernel launch\nfailed")
        return super().step(rows)


def test_an_error_at_one_shape_is_a_failed_point() -> None:
    backend = Broken()
    backend.load(MODELS["tiny"], 64, 16, 8)
    rows, result, _ = measured(backend)
    assert {row["failed"] for row in rows} == {"", "RuntimeError: kernel launch failed"}
    assert 0 < len(result["failed"]) < result["points"]


def test_a_device_that_is_gone_ends_the_probe_with_what_it_said() -> None:
    backend = Broken(after=60)
    backend.load(MODELS["tiny"], 64, 16, 8)
    with pytest.raises(
        RuntimeError, match="12 points failed one after another, the last with: RuntimeError: kernel launch failed"
    ):
        measured(backend)


def test_samples_are_told_as_they_come_and_an_interruption_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TELL", 0.01)
    told: list[Any] = []

    def tell(report: Any) -> None:
        told.append(report)
        if len(told) == 3:
            raise KeyboardInterrupt

    result = probe.run(device(), dict(SMALL), tell)
    assert result["interrupted"]
    rows = list(csv.reader(io.StringIO(result["csv"])))[1:]
    kept = [row for report in told for row in report["rows"]]
    assert [row[-5] for row in rows[: len(kept)]] == [str(row[-5]) for row in kept]  # the points, in order


def test_what_is_known_is_not_measured_again() -> None:
    rows, first, _ = measured(device())
    again, second, _ = measured(device(), resume=rows)
    assert len(again) == len(rows)
    half = [row for row in rows if int(row["point"]) % 2]
    more, third, _ = measured(device(), resume=half)
    assert {int(row["point"]) % 2 for row in more[len(half) :]} == {0}
    assert first["known"] == second["known"] == third["known"]


def test_the_time_is_kept() -> None:
    start = time.perf_counter()
    _, result, _ = measured(device(), budget=0.2, precision=1e-9)
    assert time.perf_counter() - start < 1.0
    assert result["known"] < result["points"]


def test_slow_samples_are_flagged_and_kept() -> None:
    sitting = probe.Probe(device(), dict(SMALL), lambda report: None)
    for seconds in (1.0, 1.0, 1.0, 1.6):
        sitting.rows.append({"point": 0, "seconds": seconds, "failed": "", "flagged": ""})
        sitting._note(0, seconds)
    sitting.flag()
    assert [row["flagged"] for row in sitting.rows] == ["", "", "", "outlier"]


def test_the_grid_stays_within_its_bounds() -> None:
    for point in grid(12, 300, 200, 4):
        assert point.rows + point.decoding <= 12
        assert point.rows * point.tokens <= 300
        assert max(point.tokens + point.cached, point.context) <= 200
        assert point.blocks <= 4


@pytest.mark.parametrize(
    "name",
    [
        "device/standalone",
        "device/backend",
        "device/fake",
        "device/self_test",
        "device/worker",
        "probe/grid",
        "probe/measure",
        "probe/samples",
    ],
)
def test_what_runs_next_to_the_device_needs_only_an_old_python(name: str) -> None:
    tree = ast.parse((ROOT / "calibrate" / f"{name}.py").read_text(encoding="utf-8"), feature_version=(3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(module).split(".")[0] for module in modules} <= set(sys.stdlib_module_names) | {"numpy", "servesim"}


COMMAND = ["calibrate", "probe", "--backend", "fake", "--model", "tiny", "--blocks", "64", "--host-blocks", "4", "-q"]
GRID = ["--most-rows", "8", "--most-tokens", "64", "--longest", "200"]


def test_the_command_measures_fits_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert main([*COMMAND, *GRID, "--budget", "3", "-o", str(folder)]) == 0
    assert "held-out error  decode" in capsys.readouterr().out
    before = (folder / "samples.csv").read_text(encoding="utf-8").count("\n")
    assert main([*COMMAND, *GRID, "--budget", "1", "--no-fit", "-o", str(folder)]) == 0
    assert (folder / "samples.csv").read_text(encoding="utf-8").count("\n") >= before
    header = (folder / "samples.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert set(Shape._fields) < set(header)


def test_samples_of_other_settings_are_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *GRID, "--budget", "0.2", "--no-fit", "-o", str(tmp_path)]) == 0
    assert main([*COMMAND, *GRID[:-1], "300", "--budget", "0.2", "--no-fit", "-o", str(tmp_path)]) == 2
    assert "was probed with longest 200, now 300; name another folder" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "servesim", *COMMAND, *GRID, "--budget", "60", "--precision", "1e-9"]
    started = subprocess.Popen([*command, "-o", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    samples = tmp_path / "samples.csv"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (samples.exists() and samples.stat().st_size > 5000):
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "interrupted" in said
    assert samples.read_text(encoding="utf-8").count("\n") > 20


def test_a_host_without_the_package_can_be_probed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("calibrate", "sim", "policies", "traces"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "profiles"))
    grid_of = ["--most-rows", "8", "--most-tokens", "64", "--longest", "200", "--budget", "3"]
    alone = [
        sys.executable,
        "-I",
        str(tmp_path / "calibrate" / "device" / "standalone.py"),
        "--backend",
        "fake",
        *grid_of,
    ]
    ran = subprocess.run(
        [*alone, "-o", str(tmp_path / "out")], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "points known, 0 failed" in ran.stdout
    assert main(["calibrate", "fit", str(tmp_path / "out")]) == 0
    assert "held-out error  decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--budget", "0"], "--budget: expected more than 0"),
        (["--most-rows", "1"], "--most-rows: expected at least 2"),
        (["--model", "huge"], "model 'huge': expected one of"),
        (["--option", "speed=3"], "speed"),
    ],
)
def test_a_probe_that_makes_no_sense_is_refused_in_one_line(
    tmp_path: Path, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "-o", str(tmp_path / "new"), *extra]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_bare_host_reads_options_as_the_command_does() -> None:
    from servesim.calibrate.device.standalone import option

    told = ["threads=1", "graphs=false", "kernels=reference", "path=a=b"]
    assert [option(text) for text in told] == [
        ("threads", 1), ("graphs", False), ("kernels", "reference"), ("path", "a=b"),
    ]  # fmt: skip
    with pytest.raises(argparse.ArgumentTypeError, match="expected KEY=VALUE"):
        option("threads")
