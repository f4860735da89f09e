"""Sweeps on a dask.distributed cluster: the same files as here, also if a worker or the scheduler is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from servesim.study.executor import DaskPool

from ..events import wait_until
from . import sweeps
from .test_sweep_kill import KilledWorker

os.environ["DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT"] = "300s"  # dask reads it when it is imported
pytestmark = pytest.mark.skipif(not find_spec("distributed"), reason="needs the extra `cluster` (dask.distributed)")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address of a cluster with two workers; its parts are threads of this process."""
    import distributed  # here, because it takes a second

    parts = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "protocol": "tcp", "dashboard_address": None}
    with distributed.LocalCluster(host="127.0.0.1", **parts) as cluster:
        yield cluster.scheduler_address


@pytest.mark.usefixtures("short_runs")
def test_a_sweep_over_rates_runs_on_a_cluster(tmp_path: Path, address: str) -> None:
    rates = {"rates": [2, 8], "subject_to": ["p99_ttft_ms <= 2000"], "precision": "20%"}
    file = sweeps.sweep_file(tmp_path, params={"policy.decode_batch": [2, 8]}, replications=2, **rates)
    words = ("sweep", file, "-q", "--no-report", "-o")
    assert sweeps.sim(*words, tmp_path / "out", "--executor", f"dask:{address}") == 0
    assert sweeps.sim(*words, tmp_path / "here", "-j", 1) == 0
    for name in ("runs.jsonl", "summary.csv", "capacity.csv", "best.yaml"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "here" / name).read_bytes(), name


class Losing:
    """A client of dask: a worker dies with the sixth chunk, and the scheduler is lost with the chunk `last`."""

    def __init__(self, last: int) -> None:
        self.status, self.last, self.chunks = "running", last, 0

    def nthreads(self) -> dict[str, int]:
        return {"tcp://one": 1, "tcp://two": 1}

    def get_executor(self, **_: object) -> Losing:
        return self

    def close(self) -> None:
        pass

    def submit(self, function: Any, *words: Any) -> Future[Any]:
        self.chunks += 1
        future: Future[Any] = Future()
        if self.chunks > self.last:
            self.status = "closed"
            raise RuntimeError("Tried sending message after closing")
        if self.chunks in (6, self.last):
            future.set_exception(CancelledError() if self.chunks == self.last else KilledWorker())
        else:
            future.set_result(function(*words))
        return future


def test_a_lost_worker_changes_nothing_and_a_lost_scheduler_is_one_line_and_the_sweep_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = sweeps.sweep_file(tmp_path, replications=4), tmp_path / "out"
    assert sweeps.sim("sweep", file, "-o", tmp_path / "here", "-j", 1, "-q") == 0
    clients = [Losing(12), Losing(10**6)]
    monkeypatch.setattr("servesim.study.executor.dask_pool", lambda address: DaskPool(clients.pop(0), address))
    words = ("sweep", file, "-o", out, "-q", "--executor", "dask:tcp://one")
    capsys.readouterr()
    assert sweeps.sim(*words) == 1
    lost = "the dask scheduler at tcp://one does not answer any more"
    assert capsys.readouterr().err == f"sim: {lost}; --resume -o {out} continues\n"
    kept = (out / "runs.jsonl").read_bytes()
    assert 0 < sweeps.lines(out) < 28
    assert sweeps.sim(*words, "--resume") == 0
    assert (out / "runs.jsonl").read_bytes().startswith(kept)
    assert sweeps.contents(out) == sweeps.contents(tmp_path / "here")


class Cluster:
    """A scheduler and workers as processes on loopback."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.file = folder / "scheduler.json"
        self.log = os.open(folder / "cluster.log", os.O_WRONLY | os.O_CREAT)
        self.processes = [self.start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")]
        wait_until(lambda: self.file.exists() and self.file.stat().st_size, "the scheduler")
        self.address = json.loads(self.file.read_text())["address"]
        here = ("--host", "127.0.0.1", "--nthreads", "1", "--no-nanny", "--no-dashboard")
        self.workers = [self.start("worker", *here, "--local-directory", str(folder)) for _ in range(workers)]
        self.processes += self.workers
        import distributed

        with distributed.Client(self.address) as client:
            client.wait_for_workers(workers)

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


def sweep_until_both_workers_are_held(folder: Path, cluster: Cluster) -> subprocess.Popen[str]:
    """Start a sweep on the cluster; return it in the middle of its runs."""
    file, where = sweeps.held_sweep_file(folder, replications=60), f"dask:{cluster.address}"
    process = sweeps.start("sweep", file, "-o", folder / "out", "--executor", where, "-q", "--trust")
    wait_until(lambda: sweeps.held(folder) == 2 or process.poll() is not None, "two workers in their 31st run")
    wait_until(lambda: sweeps.lines(folder / "out") or process.poll() is not None, "the first line")
    return process


@pytest.mark.slow
def test_a_sweep_survives_the_death_of_a_dask_worker(tmp_path: Path, cluster: Cluster) -> None:
    process = sweep_until_both_workers_are_held(tmp_path, cluster)
    cluster.workers[0].send_signal(signal.SIGKILL)
    (tmp_path / "hold").unlink()
    text, error = process.communicate()
    assert process.returncode == 0, error
    assert "7 configurations, 420 runs" in text
    words = ("sweep", tmp_path / "sweep.yaml", "-o", tmp_path / "here", "-j", 1, "--trust")
    assert sweeps.sim(*words) == 0
    assert sweeps.contents(tmp_path / "out") == sweeps.contents(tmp_path / "here")


@pytest.mark.slow
def test_a_sweep_whose_scheduler_is_killed_ends_with_one_line_and_continues(tmp_path: Path, cluster: Cluster) -> None:
    process, out = sweep_until_both_workers_are_held(tmp_path, cluster), tmp_path / "out"
    cluster.processes[0].send_signal(signal.SIGKILL)
    _, error = process.communicate()
    assert process.returncode == 1, error
    lost = f"the dask scheduler at {cluster.address} does not answer any more"
    assert error == f"sim: {lost}; --resume -o {out} continues\n"
    (tmp_path / "hold").unlink()
    kept = (out / "runs.jsonl").read_bytes()
    assert 0 < sweeps.lines(out) < 420
    words = ("sweep", tmp_path / "sweep.yaml", "-j", 1, "-q", "--trust", "-o")
    assert sweeps.sim(*words, out, "--resume") == 0
    assert (out / "runs.jsonl").read_bytes().startswith(kept)
    assert sweeps.sim(*words, tmp_path / "here") == 0
    assert sweeps.contents(out) == sweeps.contents(tmp_path / "here")
