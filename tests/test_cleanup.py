"""A test that times out leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

HANGING_TEST = """
import subprocess
import time

import pytest

@pytest.mark.timeout(2)
def test_hangs():
    command = "(sleep 600 & echo $! > grandchild); sleep 600 & echo $! > child; wait"
    subprocess.Popen(["bash", "-c", command], start_new_session=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_processes_of_a_test_that_times_out_are_killed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_hanging.py").write_text(HANGING_TEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_hanging.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "Timeout (>2" in done.stdout
    for name in ("child", "grandchild"):
        assert not running(int((tmp_path / name).read_text()))


def running(pid: int) -> bool:
    """Return whether a process exists and is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
