"""Traces from standard input: the same result as from the file, and one line for what cannot be read."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from servesim.files.read import read_stdin

from .. import warm
from .running import Said, run_sim

TRACE = b"arrival,prompt,output\n" + b"".join(b"%d,%d,%d\n" % (k, 10 + k, 3 + k % 5) for k in range(20))


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Return a function that runs a command in an empty folder, with this standard input."""
    monkeypatch.chdir(tmp_path)

    def run(*words: Any, data: bytes = TRACE) -> Said:
        read_stdin.cache_clear()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return run_sim(capsys, *map(str, words))

    return run


def test_run_reads_the_same_requests_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(TRACE)
    for name, source, data in (("file", "trace.csv", b""), ("pipe", "-", TRACE), ("packed", "-", gzip.compress(TRACE))):
        subprocess.run([warm.sim(), "run", "--trace", source, "-o", name], input=data, cwd=tmp_path, check=True)
    requests = [(tmp_path / name / "requests.csv").read_bytes() for name in ("file", "pipe", "packed")]
    assert requests[0] == requests[1] == requests[2] and len(requests[0].splitlines()) == 21


def test_replay_reads_a_pipe_for_the_live_and_the_simulated_run(tmp_path: Path, sim: Callable[..., Said]) -> None:
    words = ("--backend", "fake", "--time-scale", "0.001", "--warm-up", 0, "--set", "profile={base: 0.0001}")
    said = sim("replay", "--trace", "-", *words, "-o", "out")
    assert said.code == 0, said.error
    assert len((tmp_path / "out" / "sim" / "requests.csv").read_text().splitlines()) == 21


def test_trace_commands_read_a_pipe(tmp_path: Path, sim: Callable[..., Said]) -> None:
    converted = sim("trace", "convert", "-", "--scale", "2", "-o", "-")
    assert converted.code == 0 and len(converted.out.splitlines()) == 21
    assert not list(tmp_path.iterdir())
    first, again = (sim("trace", "inspect", "-", "--json", data=data) for data in (TRACE, converted.out.encode()))
    assert first.code == again.code == 0 and first.out != again.out


def test_a_parquet_file_comes_through_a_pipe(tmp_path: Path, sim: Callable[..., Said]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    columns = {"arrival": [0.0, 1.0], "prompt": [4, 5], "output": [2, 3]}
    write_table(pyarrow.table(columns), tmp_path / "trace.parquet")
    said = sim("trace", "convert", "-", data=(tmp_path / "trace.parquet").read_bytes())
    assert said.code == 0 and len(said.out.splitlines()) == 3, said.error


@pytest.mark.parametrize("data", [b"", b"\0\1\2", b"prompt\nx\n", b"\x1f\x8bdamaged"])
def test_bad_input_is_one_line_that_names_standard_input(data: bytes, sim: Callable[..., Said]) -> None:
    said = sim("run", "--trace", "-", data=data)
    assert said.code == 2 and said.error.startswith("sim: standard input: row 1: "), said.error
    assert said.error.count("\n") == 1


def test_a_sweep_needs_a_file(tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "sweep.yaml").write_text("base: {trace: '-'}\nparams: {policy.decode_batch: [8, 16]}\n")
    said = sim("sweep", "sweep.yaml", "-o", "out")
    assert said.code == 2 and said.error.startswith("sim: trace -: expected a file"), said.error
    assert os.listdir(tmp_path) == ["sweep.yaml"]
