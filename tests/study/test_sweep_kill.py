"""A sweep that is killed, interrupted, out of disk space or without a worker loses no run and repeats none."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from servesim.core import BadInput
from servesim.core.errors import WorkerLost
from servesim.study.executor import Pool, Serial, run_all
from servesim.study.journal import Journal, read_journal
from servesim.study.sweep import sweep
from servesim.study.sweep_file import read_experiment

from ..events import wait_until
from . import sweeps

REPLICATIONS = 72  # of 7 configurations


def whole_sweep(folder: Path, replications: int) -> Path:
    """Write a sweep file and the result of an uninterrupted sweep in `out`."""
    assert sweeps.sim("sweep", sweeps.sweep_file(folder, replications=replications), "-o", folder / "out", "-j", 1) == 0
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_sweep(tmp_path_factory.mktemp("whole"), REPLICATIONS)


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_sweep_killed_at_random_times_ends_byte_identical_without_orphans(tmp_path: Path) -> None:
    rng, out = random.Random(6), tmp_path / "out"
    file = sweeps.held_sweep_file(tmp_path, replications=REPLICATIONS)
    words = ("sweep", file, "-o", out, "--resume", "-j", 2, "--trust")
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        for mark in tmp_path.glob("held-*"):
            mark.unlink()
        process = sweeps.start(*words)
        target = sweeps.lines(out) + rng.randint(1, 30)
        wait_until(lambda: sweeps.lines(out) >= target or sweeps.held(tmp_path) == 2, "runs")  # noqa: B023
        workers = children(process.pid)
        process.send_signal(number)
        _, error = process.communicate()
        wait_until(lambda: not any(alive(pid) for pid in workers), "the end of the workers")  # noqa: B023
        assert process.returncode == (130 if number in (signal.SIGINT, signal.SIGTERM) else -number), error
        assert number == signal.SIGKILL or "--resume" in error
    assert 0 < sweeps.lines(out) < 7 * REPLICATIONS
    (tmp_path / "hold").unlink()
    process = sweeps.start(*words)
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert sweeps.sim("sweep", file, "-o", tmp_path / "whole", "-j", 1, "--trust") == 0
    assert sweeps.contents(out) == sweeps.contents(tmp_path / "whole")


def test_a_journal_cut_at_any_byte_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    whole = whole_sweep(tmp_path, 4)
    text = (whole / "out/runs.jsonl").read_bytes()
    experiment = read_experiment(whole / "sweep.yaml")
    rng = random.Random(2)
    last = text.rfind(b"\n", 0, len(text) - 1) + 1
    for cut in [0, 1, last - 1, last, last + 1, len(text) - 1, rng.randrange(len(text) * 9 // 10, len(text))]:
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "experiment.json").write_bytes((whole / "out/experiment.json").read_bytes())
        (folder / "runs.jsonl").write_bytes(text[:cut])
        if cut > 1:
            sweep(experiment, folder, Serial(), resume=True)
            assert (folder / "runs.jsonl").read_bytes() == text
        else:
            with Journal(folder / "runs.jsonl") as journal:
                assert journal.records == []


@pytest.mark.slow
def test_a_full_disk_ends_the_sweep_with_one_line_and_it_can_be_resumed(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    size = (whole / "out/runs.jsonl").stat().st_size
    limit = size // 3 // 1024
    words = f"'{sys.executable}' -m servesim sweep '{whole}/sweep.yaml' -o '{out}' -j 2 -q"
    done = subprocess.run(["bash", "-c", f"ulimit -f {limit}; exec {words}"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"sim: {out}/runs.jsonl: File too large; free disk space, then continue with --resume\n"
    kept = (out / "runs.jsonl").read_bytes()
    assert kept.endswith(b"\n") and (whole / "out/runs.jsonl").read_bytes().startswith(kept)
    assert sweeps.sim("sweep", whole / "sweep.yaml", "-o", out, "--resume", "-j", 1) == 0
    assert sweeps.contents(out) == sweeps.contents(whole / "out")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_no_space_left_leaves_only_complete_lines(whole: Path, tiny_disk: Path, tmp_path: Path) -> None:
    process = sweeps.start("sweep", whole / "sweep.yaml", "-o", tiny_disk / "out", "-j", 2, "-q")
    _, error = process.communicate()
    assert process.returncode == 1
    message = "No space left on device; free disk space, then continue with --resume"
    assert error == f"sim: {tiny_disk}/out/runs.jsonl: {message}\n"
    kept = read_journal(tiny_disk / "out/runs.jsonl")
    assert 0 < len(kept) < 7 * REPLICATIONS
    subprocess.run(["cp", "-r", tiny_disk / "out", tmp_path / "out"], check=True)
    assert sweeps.sim("sweep", whole / "sweep.yaml", "-o", tmp_path / "out", "--resume", "-j", 1) == 0
    assert sweeps.contents(tmp_path / "out") == sweeps.contents(whole / "out")


@pytest.mark.slow
def test_no_run_is_lost_when_a_worker_dies(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import os\nfrom pathlib import Path\nfrom servesim.policies.llm_serving import LLMServing\n\n"
        f"MARK = Path({str(tmp_path / 'mark')!r})\n\n"
        "class Deadly(LLMServing):\n    def decide(self, view):\n"
        "        if view.now > 3 and not MARK.exists():\n"
        "            MARK.touch()\n            os.kill(os.getpid(), 9)\n"
        "        return super().decide(view)\n"
    )
    file = sweeps.sweep_file(tmp_path, base=sweeps.base(policy={"name": f"{own}:Deadly"}), replications=2)
    process = sweeps.start("sweep", file, "-o", tmp_path / "out", "-j", 2, "-q", "--trust")
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert (tmp_path / "mark").exists()
    assert sweeps.sim("sweep", file, "-o", tmp_path / "again", "-j", 1, "--trust") == 0
    assert sweeps.contents(tmp_path / "out") == sweeps.contents(tmp_path / "again")


class KilledWorker(Exception):
    """Has the name of distributed's exception."""


class DyingExecutor:
    """An executor whose workers die on some chunks."""

    def __init__(self, deaths: dict[int, int]) -> None:
        self.deaths = deaths

    def submit(self, function: Any, context: str, tasks: list[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        first = tasks[0].config
        if self.deaths.get(first, 0) > 0:
            self.deaths[first] -= 1
            future.set_exception(KilledWorker(first))
        else:
            future.set_result([{"config": task.config, "replication": 0} for task in tasks])
        return future


def test_chunks_of_dead_workers_are_retried_three_times(tmp_path: Path) -> None:
    experiment = read_experiment(sweeps.sweep_file(tmp_path))
    tasks = [experiment.task(0, 0)._replace(config=k) for k in range(40)]
    pool = Pool(lambda: DyingExecutor({3: 3, 8: 1}), lambda: 2, lambda _: None)  # type: ignore[arg-type,return-value]
    configs = [record["config"] for record in run_all(pool, experiment.context, tasks)]
    assert configs == list(range(40))
    fatal = Pool(lambda: DyingExecutor({3: 4}), lambda: 2, lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(WorkerLost, match="workers died 4 times on configuration/replication 3/0"):
        list(fatal.run("", tasks))


def test_two_sweeps_cannot_write_to_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "runs.jsonl"):
        with pytest.raises(BadInput, match="another process is writing to it"), Journal(tmp_path / "runs.jsonl"):
            pass
        assert os.path.getsize(tmp_path / "runs.jsonl") == 0


def test_a_line_that_is_not_a_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text(json.dumps({"config": 0, "replication": 0, "error": "?"}) + "\nnonsense\n")
    with pytest.raises(BadInput, match=r"runs.jsonl:2: not a journal line"):
        read_journal(tmp_path / "runs.jsonl")
