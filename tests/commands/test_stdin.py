"""Traces from standard input: the same result as from the file, and one line for what cannot be read."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRACE = b"arrival,prompt,output\n" + b"".join(b"%d,%d,%d\n" % (k, 10 + k, 3 + k % 5) for k in range(20))


def sim(folder: Path, *words: Any, data: bytes = TRACE) -> subprocess.CompletedProcess[bytes]:
    """Run a command with this standard input."""
    command = [sys.executable, "-m", "servesim", *map(str, words)]
    return subprocess.run(command, input=data, capture_output=True, cwd=folder, check=False)


def test_run_reads_the_same_requests_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(TRACE)
    for name, source, data in (("file", "trace.csv", b""), ("pipe", "-", TRACE), ("packed", "-", gzip.compress(TRACE))):
        done = sim(tmp_path, "run", "--trace", source, "-o", name, data=data)
        assert done.returncode == 0, done.stderr
    requests = [(tmp_path / name / "requests.csv").read_bytes() for name in ("file", "pipe", "packed")]
    assert requests[0] == requests[1] == requests[2] and len(requests[0].splitlines()) == 21


def test_replay_reads_a_pipe_for_the_live_and_the_simulated_run(tmp_path: Path) -> None:
    words = (
        "--backend", "fake", "--time-scale", "0.001", "--warm-up", 0, "--set", "profile={base: 0.0001}", "-o", "out",
    )  # fmt: skip
    done = sim(tmp_path, "replay", "--trace", "-", *words)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "sim" / "requests.csv").read_text().splitlines()) == 21


def test_trace_commands_read_a_pipe(tmp_path: Path) -> None:
    converted = sim(tmp_path, "trace", "convert", "-", "--scale", "2", "-o", "-")
    assert converted.returncode == 0 and len(converted.stdout.splitlines()) == 21
    assert not list(tmp_path.iterdir())
    first, again = (sim(tmp_path, "trace", "inspect", "-", "--json", data=d) for d in (TRACE, converted.stdout))
    assert first.returncode == again.returncode == 0 and first.stdout != again.stdout


def test_a_parquet_file_comes_through_a_pipe(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    columns = {"arrival": [0.0, 1.0], "prompt": [4, 5], "output": [2, 3]}
    write_table(pyarrow.table(columns), tmp_path / "trace.parquet")
    done = sim(tmp_path, "trace", "convert", "-", data=(tmp_path / "trace.parquet").read_bytes())
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, done.stderr


@pytest.mark.parametrize("data", [b"", b"\0\1\2", b"prompt\nx\n", b"\x1f\x8bdamaged"])
def test_bad_input_is_one_line_that_names_standard_input(data: bytes, tmp_path: Path) -> None:
    done = sim(tmp_path, "run", "--trace", "-", data=data)
    assert done.returncode == 2 and done.stderr.startswith(b"sim: standard input: row 1: "), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_sweep_needs_a_file(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("base: {trace: '-'}\nparams: {policy.decode_batch: [8, 16]}\n")
    done = sim(tmp_path, "sweep", "sweep.yaml", "-o", "out")
    assert done.returncode == 2 and done.stderr.startswith(b"sim: trace -: expected a file"), done.stderr
    assert os.listdir(tmp_path) == ["sweep.yaml"]
