"""A test that times out leaves no process behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

HANGING_TEST = """
import signal
import subprocess

import pytest

@pytest.mark.timeout(7200)
def test_hangs():
    command = "(sleep 6000 & echo $! > grandchild); sleep 6000 & echo $! > child; echo; wait"
    process = subprocess.Popen(["bash", "-c", command], start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    signal.raise_signal(signal.SIGALRM)  # the time is over
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_processes_of_a_test_that_times_out_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("conftest.py", "warm.py"):
        shutil.copy(ROOT / "tests" / name, folder)
    (folder / "test_hanging.py").write_text(HANGING_TEST)
    options = ["-p", "no:cacheprovider", "-q", "--import-mode=importlib", "--rootdir", tmp_path]
    command = [sys.executable, "-m", "pytest", *options, "tests/test_hanging.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Timeout (>7200" in done.stdout
    for name in ("child", "grandchild"):
        assert not running(int((tmp_path / name).read_text()))


def running(pid: int) -> bool:
    """Return whether a process exists and is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
