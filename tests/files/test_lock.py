"""Two commands in one folder: the second one is refused with one line, and the files of the first one are whole."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servesim.core import BadInput
from servesim.files.lock import only_writer

from .. import warm
from ..commands.running import run_sim
from ..events import wait_until

SCENARIO = """
workload: {requests: 3, arrivals: {kind: burst}, lengths: {prompt: 8, output: 4}}
profile: {base: 0.001}
policy: mine.py:Held
"""
POLICY = """
import time
from dataclasses import dataclass
from pathlib import Path
from servesim.policies.papers import Orca
@dataclass(frozen=True)
class Held(Orca):
    def decide(self, view):
        folder = Path(__file__).parent
        (folder / "started").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        return super().decide(view)
"""
REPLAY = ("replay", "s.yaml", "--backend", "fake", "--warm-up", "0", "-q", "-o", "out")


def test_a_second_command_in_the_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SCENARIO)
    Path("mine.py").write_text(POLICY)
    with subprocess.Popen([warm.sim(), *REPLAY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        wait_until(lambda: Path("started").exists() or first.poll() is not None, "the first command")
        second = run_sim(capsys, *REPLAY)
        assert first.poll() is None, first.communicate()
        Path("go").touch()
        _, error = first.communicate()
        assert first.returncode == 0, error
    assert second.code == 2
    assert second.error == "sim: out: another process is writing to it; wait for it, or use another folder\n"
    third = run_sim(capsys, *REPLAY)  # the lock is released, and the replay stays as it is
    assert third.code == 2 and third.error.startswith("sim: out: already holds a replay")


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from servesim.files.lock import only_writer; import time\n\
with only_writer(Path({str(tmp_path / 'out')!r})):\n    print('locked', flush=True)\n    time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    with pytest.raises(BadInput, match="another process is writing to it"), only_writer(tmp_path / "out"):
        pass
    assert (tmp_path / "out").is_dir()  # the refused writer leaves the empty folder of the other
    process.send_signal(signal.SIGKILL)
    process.wait()
    with only_writer(tmp_path / "out"):
        (tmp_path / "out" / "x").touch()


def test_a_folder_without_files_is_removed_and_a_file_is_no_folder(tmp_path: Path) -> None:
    with only_writer(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="expected a folder to write to, found a file"), only_writer(tmp_path / "file"):
        pass
