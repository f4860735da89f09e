"""A sweep on a real dask.distributed cluster: a scheduler and two workers as processes, and one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import sweeps

pytest.importorskip("distributed", reason="needs the extra `cluster` (dask.distributed)")


class Cluster:
    """The processes of a cluster on loopback."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.file = folder / "scheduler.json"
        self.log = os.open(folder / "cluster.log", os.O_WRONLY | os.O_CREAT)
        self.processes = [self.start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")]
        end = time.monotonic() + 300
        while not self.file.exists() or not self.file.stat().st_size:
            assert time.monotonic() < end, "the scheduler did not start"
            time.sleep(0.05)
        self.address = json.loads(self.file.read_text())["address"]
        here = ("--host", "127.0.0.1", "--nthreads", "1", "--no-nanny", "--no-dashboard")
        self.workers = [self.start("worker", *here, "--local-directory", str(folder)) for _ in range(workers)]
        self.processes += self.workers

    def start(self, kind: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", kind, "--scheduler-file", str(self.file), *words]
        return subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        os.close(self.log)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path, 2)
    yield running
    running.close()


def runs(folder: Path) -> int:
    path = folder / "runs.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def start_and_wait_for_20_runs(file: Path, out: Path, cluster: Cluster) -> subprocess.Popen[str]:
    process = sweeps.start("sweep", file, "-o", out, "--executor", f"dask:{cluster.address}", "-q")
    end = time.monotonic() + 300
    while process.poll() is None and runs(out) < 20:
        assert time.monotonic() < end, "no run finished"
        time.sleep(0.01)
    return process


def test_a_sweep_survives_the_death_of_a_dask_worker(tmp_path: Path, cluster: Cluster) -> None:
    file = sweeps.sweep_file(tmp_path, replications=20)
    out = tmp_path / "out"
    process = start_and_wait_for_20_runs(file, out, cluster)
    cluster.workers[0].send_signal(signal.SIGKILL)
    assert runs(out) < 140, "the sweep ended before the worker was killed"
    text, error = process.communicate(timeout=3000)
    assert process.returncode == 0, error
    assert "7 configurations, 140 runs" in text
    assert sweeps.sim("sweep", file, "-o", tmp_path / "here", "-j", 1) == 0
    assert sweeps.contents(out) == sweeps.contents(tmp_path / "here")


def test_a_sweep_whose_scheduler_is_killed_ends_with_one_line_and_continues(tmp_path: Path, cluster: Cluster) -> None:
    file = sweeps.sweep_file(tmp_path, replications=60)
    out = tmp_path / "out"
    process = start_and_wait_for_20_runs(file, out, cluster)
    cluster.processes[0].send_signal(signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    lost = f"the dask scheduler at {cluster.address} does not answer any more"
    assert error == f"sim: {lost}; --resume -o {out} continues\n"
    kept = (out / "runs.jsonl").read_bytes()
    assert 20 <= runs(out) < 420
    assert sweeps.sim("sweep", file, "-o", out, "-j", 1, "-q", "--resume") == 0
    assert (out / "runs.jsonl").read_bytes().startswith(kept)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "here", "-j", 1, "-q") == 0
    assert sweeps.contents(out) == sweeps.contents(tmp_path / "here")


@pytest.mark.slow
def test_a_sweep_over_rates_runs_on_a_cluster(tmp_path: Path, cluster: Cluster) -> None:
    file = sweeps.sweep_file(tmp_path, rates=[2, 8], subject_to=["p99_ttft_ms <= 2000"], precision="20%")
    words = ("sweep", file, "-q", "--no-report", "-o")
    assert sweeps.sim(*words, tmp_path / "out", "--executor", f"dask:{cluster.address}") == 0
    assert sweeps.sim(*words, tmp_path / "here", "-j", 1) == 0
    for name in ("runs.jsonl", "summary.csv", "capacity.csv", "best.yaml"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "here" / name).read_bytes(), name
