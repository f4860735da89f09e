"""Every command that writes files, under a real limit of the file size: one line, and no partial file."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from servesim.calibrate.probe.measure import COLUMNS
from servesim.cli import main
from servesim.core import BadInput
from servesim.files.step_table import append_steps, write_steps
from servesim.report.figures import Picture, save
from servesim.report.plots import Chart
from servesim.runs.run_folder import read_run
from servesim.traces.read.formats import load as load_trace

from .. import warm


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let the system refuse files of more than `size` bytes. Python writes no bytecode then, which would be cut."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes_no_bytecode


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("words", "limit", "file"),
    [
        (("run", "-X", "20", "-T", "20", "-o", "out"), 500, "out/requests.csv"),
        (("run", "-X", "20", "-T", "20", "--decisions", "d.jsonl"), 500, "d.jsonl"),
        (("run", "-X", "20", "-T", "20", "--decisions", "d.jsonl.gz"), 100, "d.jsonl.gz"),
        (("run", "-X", "20", "-T", "20", "--timeline", "t.json"), 500, "t.json"),
        (("trace", "synth", "-X", "20", "-T", "20", "-o", "t.csv"), 500, "t.csv"),
        (("config", "init", "new.yaml"), 100, "new.yaml"),
        (("config", "init", "old.yaml"), 100, "old.yaml"),
    ],
)
def test_a_file_size_limit_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    limit: int,
    file: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text("mine")
    with file_size_limit(limit):
        assert main(words) == 2
    reason = "exists already and is not overwritten; use another name" if file == "old.yaml" else "File too large"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"sim: {file}: ")
    assert last.endswith(reason)
    assert files(tmp_path) == ["old.yaml"]
    assert (tmp_path / "old.yaml").read_text() == "mine"


def test_a_chart_over_the_limit_leaves_the_old_chart(tmp_path: Path) -> None:
    empty = Picture("knobs", [Chart("knobs", "", [], {"xaxis": {}, "yaxis": {}})])
    save(empty, tmp_path / "knobs.png")  # matplotlib writes its cache now
    old = (tmp_path / "knobs.png").read_bytes()
    with file_size_limit(3000), pytest.raises(BadInput, match=r"knobs\.png: cannot be drawn: File too large$"):
        save(empty, tmp_path / "knobs.png")
    assert files(tmp_path) == ["knobs.png"]
    assert (tmp_path / "knobs.png").read_bytes() == old


def test_a_failed_append_leaves_samples_usable(tmp_path: Path) -> None:
    samples = tmp_path / "samples.csv"
    write_steps(samples, COLUMNS, [])
    before = samples.read_bytes()
    with file_size_limit(len(before) + 20), pytest.raises(BadInput, match=r"samples\.csv: .*: File too large$"):
        append_steps(samples, [["x" * 50] * 100])
    assert samples.read_bytes() == before


def test_standard_output_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as full:
        command = [warm.sim(), "config", "init"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "sim: standard output: cannot be written: No space left on device\n")


def test_ids_that_look_like_formulas_come_back_from_a_trace(tmp_path: Path) -> None:
    ids = ["=1+1", "@a", "-x", "'=2", "plain"]
    rows = "".join(f"{number},5,6,{name}\n" for number, name in enumerate(ids))
    (tmp_path / "in.csv").write_text("arrival_s,prompt_tokens,output_tokens,id\n" + rows.replace("'=2", "''=2"))
    assert main(["trace", "convert", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.csv")]) == 0
    assert [request.id for request in load_trace(tmp_path / "out.csv").requests] == ids
    assert not any(
        line.split(",")[3].startswith(("=", "@", "-")) for line in (tmp_path / "out.csv").read_text().split()
    )


def test_ids_that_look_like_formulas_come_back_from_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("arrival_s,prompt_tokens,output_tokens,id\n0,5,6,=1+1\n1,5,6,b\n")
    assert main(["run", "--trace", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out")]) == 0
    assert "\n'=1+1," in (tmp_path / "out/requests.csv").read_text()
    assert list(read_run(tmp_path / "out").requests) == ["=1+1", "b"]
