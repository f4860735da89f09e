"""The worker process with the fake backend: its protocol, its failures and their error messages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.device import worker_client
from servesim.calibrate.device.backend import MODELS, OutOfMemory, Row
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.device.worker_client import Worker, WorkerFailed

from ...conftest import ROOT
from ...events import wait_until
from ..conftest import VirtualTime
from .stepping_worker import SteppingWorker

FREE: dict[str, float] = {}  # a cost model of 0 seconds
ROWS = [Row([5, 6, 7], 0, [3]), Row([9], 0, [1])]

JOB = """
import os, subprocess, sys, time

def run(backend, args, emit):
    if args["what"] == "chatter":
        print("a framework says hello")
        os.write(1, b"and so does its C++\\n")
        subprocess.run(["echo", "and its children"], check=True)
        sys.stdin.read()
    for k in range(args.get("reports", 0)):
        emit({"done": k})
    if args["what"] == "sleep":
        time.sleep(3600)
    if args["what"] == "die":
        sys.stderr.write("first words\\nlast words\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), 9)
    if args["what"] == "raise":
        raise ValueError("one thing\\nand another")
    open("dropped.txt", "w").close()
    return {"cwd": os.getcwd(), "what": args["what"]}
"""


@pytest.fixture
def fake() -> Iterator[SteppingWorker]:
    with SteppingWorker("fake", cost=FREE) as worker:
        worker.load("micro", blocks=8, block_size=4, host_blocks=2)
        yield worker


@pytest.fixture
def package_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folders that a device host needs, with a test job instead of the probe."""
    home = tmp_path / "copy"
    for folder in ("sim", "policies", "calibrate"):
        shutil.copytree(ROOT / folder, home / folder, ignore=shutil.ignore_patterns("__pycache__", "profiles"))
    (home / "calibrate" / "probe" / "measure.py").write_text(JOB)
    monkeypatch.setattr(worker_client, "WORKER_SCRIPT", home / "calibrate" / "device" / "worker.py")
    return home


def test_a_worker_gives_the_tokens_of_the_same_backend_in_this_process(fake: SteppingWorker) -> None:
    here = FakeBackend(FREE)
    here.load(MODELS["micro"], blocks=8, block_size=4, host_blocks=2)
    assert fake.step(ROWS) == here.step(ROWS)
    assert fake.describe() == here.describe()
    assert fake.describe()["model"]["name"] == "micro"


def test_worker_runs_from_copied_folders_without_an_installed_package(package_copy: Path) -> None:
    with SteppingWorker("fake") as worker:
        assert worker.about["package"] == str(package_copy / "sim")
        worker.load("micro", 4, 4)
        assert len(worker.step(ROWS)) == 2


def test_worker_runs_from_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "servesim"
    shutil.copytree(ROOT / "sim", package)
    shutil.copytree(ROOT / "calibrate", package / "calibrate", ignore=shutil.ignore_patterns("profiles"))
    monkeypatch.setattr(worker_client, "WORKER_SCRIPT", package / "calibrate" / "device" / "worker.py")
    with Worker("fake") as worker:
        assert worker.about["package"] == str(package)


def test_worker_runs_on_python_3_9(package_copy: Path) -> None:
    known = [shutil.which("python3.9"), *map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python"))]
    python = next(
        (path for path in known if path and subprocess.run([path, "-V"], capture_output=True).returncode == 0), None
    )
    if python is None:
        pytest.skip("no Python 3.9 on this machine")
    with Worker("fake", python=python) as worker:
        assert worker.about["python"].startswith("3.9.")
        assert worker.describe()["device"] == "fake"


def test_the_folder_of_the_worker_hides_no_module_of_the_standard_library(package_copy: Path) -> None:
    (package_copy / "calibrate" / "device" / "profile.py").write_text("raise ImportError('hidden')")
    job = "import profile\ndef run(*_): return profile.__name__"
    (package_copy / "calibrate" / "probe" / "measure.py").write_text(job)
    with Worker("fake") as worker:
        assert worker.call("probe") == "profile"


def test_framework_output_and_input_do_not_disturb_the_protocol(package_copy: Path) -> None:
    with Worker("fake") as worker:
        assert worker.call("probe", what="chatter")["what"] == "chatter"
        assert worker.describe()["device"] == "fake"


def test_a_long_job_reports_progress(package_copy: Path) -> None:
    reports: list[Any] = []
    with Worker("fake") as worker:
        worker.call("probe", progress=reports.append, what="count", reports=3)
    assert reports == [{"done": 0}, {"done": 1}, {"done": 2}]


def test_files_of_a_job_are_removed_with_the_worker(package_copy: Path) -> None:
    with Worker("fake") as worker:
        home = Path(worker.call("probe", what="drop")["cwd"])
        assert (home / "dropped.txt").exists()
        assert home != Path.cwd()
    assert not home.exists()


def test_an_exception_is_one_line_and_the_worker_stays_usable(package_copy: Path) -> None:
    with Worker("fake") as worker:
        with pytest.raises(WorkerFailed) as caught:
            worker.call("probe", what="raise")
        assert str(caught.value) == "fake worker: probe failed, ValueError: one thing"
        assert "and another" in caught.value.traceback
        assert worker.describe()["device"] == "fake"


def test_error_of_a_killed_worker_has_the_signal_and_the_last_stderr_line(package_copy: Path) -> None:
    with Worker("fake") as worker:
        with pytest.raises(WorkerFailed, match=r"died in probe, killed by SIGKILL: last words$"):
            worker.call("probe", what="die")
        with pytest.raises(WorkerFailed, match="died in describe"):
            worker.describe()


def test_a_worker_without_reply_is_killed(package_copy: Path) -> None:
    with Worker("fake") as worker:
        with pytest.raises(WorkerFailed, match=r"no reply to probe within 0\.3 s; it was killed"):
            worker.call("probe", timeout=0.3, what="sleep")
        assert gone(worker.about["pid"])


def test_a_worker_is_killed_when_the_progress_callback_raises(package_copy: Path) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with Worker("fake") as worker:
        with pytest.raises(KeyboardInterrupt):
            worker.call("probe", progress=interrupt, what="sleep", reports=1)
        assert gone(worker.about["pid"])


def test_a_worker_exits_when_its_parent_is_killed(package_copy: Path) -> None:
    parent = f"""
    from pathlib import Path
    from servesim.calibrate.device import worker_client
    worker_client.WORKER_SCRIPT = Path({str(worker_client.WORKER_SCRIPT)!r})
    worker = worker_client.Worker("fake")
    print(worker.about["pid"], flush=True)
    worker.call("probe", what="sleep")
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: gone(pid), "the end of the worker")


def test_out_of_memory_has_its_own_error_and_the_backend_stays_usable() -> None:
    with SteppingWorker("fake", cost=FREE, limit=3) as worker:
        worker.load("micro", 8, 4)
        with pytest.raises(OutOfMemory, match=r"^fake device: 4 tokens in a step, the limit is 3$"):
            worker.step(ROWS)
        assert len(worker.step(ROWS[:1])) == 1


def test_an_unsynchronised_step_of_a_delayed_device_would_look_short(virtual_time: VirtualTime) -> None:
    device = FakeBackend({"base": 0.01}, lag=1.0)
    device.load(MODELS["micro"], 8, 4)
    device.step(ROWS)
    assert 0.01 <= virtual_time.now < 0.02
    device.synchronize()
    assert 1.01 <= virtual_time.now < 1.02


def test_a_fake_step_takes_the_time_of_the_cost_model(virtual_time: VirtualTime) -> None:
    device = FakeBackend(
        {"base": 0.02, "prefill_token": 0.01, "decode_row": 0.005, "context": 0.001, "swap_block": 0.015}
    )
    device.load(MODELS["micro"], 8, 4, 2)
    steps = [
        (0.05, lambda: device.step([Row([1, 2, 3], 0, [0])])),
        (0.028, lambda: device.step([Row([4], 3, [0])])),
        (0.053, lambda: device.step([Row([7, 7], 4, [0, 1]), Row([4], 8, [2, 3, 4])])),
        (0.035, lambda: device.swap_out([(0, 1)])),
    ]
    for expected, work in steps:
        start = virtual_time.now
        work()
        assert expected <= virtual_time.now - start < expected + 0.001


def test_a_fake_step_reads_every_cached_token_through_its_block_table() -> None:
    device = FakeBackend(FREE)
    device.load(MODELS["tiny"], 8, 4, 2)
    prompt = [11, 22, 33, 44, 55, 66]
    first = device.step([Row(prompt, 0, [5, 2])])
    assert device.step([Row(prompt, 0, [1, 7])]) == first
    right = device.step([Row([9], 6, [5, 2])])
    assert device.step([Row([9], 6, [1, 7])]) == right
    device.swap_out([(5, 1), (2, 0)])
    device.step([Row([0] * 8, 0, [5, 2])])
    device.swap_in([(1, 3), (0, 6)])
    assert device.step([Row([9], 6, [3, 6])]) == right
    assert device.step([Row([9], 6, [6, 3])]) != right


def gone(pid: int) -> bool:
    """Return whether the process has ended."""
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/status")  # the child of a killed parent may be left as a zombie
    return status.exists() and "State:\tZ" in status.read_text()
