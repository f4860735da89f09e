"""Two commands in one folder: the second one is refused with one line, and the files of the first one are whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servesim.core import BadInput
from servesim.files.lock import only_writer

SCENARIO = """
workload: {requests: 30, arrivals: {kind: poisson, rate: 3}, lengths: {prompt: 8, output: 4}}
profile: {base: 0.001}
policy: vllm-v1
"""
COMMAND = "replay s.yaml --backend fake --warm-up 0 -q"


def start(folder: Path, words: str) -> subprocess.Popen[str]:
    """Start a command that writes to `out`."""
    command = [sys.executable, "-m", "servesim", *words.split(), "-o", "out"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_command_in_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    first = start(tmp_path, COMMAND)
    end = time.monotonic() + 120
    while not (tmp_path / "out").exists():
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.2)  # between the folder and its lock
    second = start(tmp_path, COMMAND)
    _, error = second.communicate(timeout=120)
    assert first.poll() is None, "the first command ended before the second one"
    assert second.returncode == 2
    assert error == "sim: out: another process is writing to it; wait for it, or use another folder\n"
    assert first.wait(timeout=120) == 0
    third = start(tmp_path, COMMAND)  # the lock is released, and the replay stays as it is
    _, error = third.communicate(timeout=120)
    assert third.returncode == 2 and error.startswith("sim: out: already holds a replay")


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
