"""Temporary folders: removed at the end, and at the next start after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from servesim.files.scratch import ScratchFolder

HOLD = "from servesim.files.scratch import ScratchFolder\nf = ScratchFolder()\nprint(f.name, flush=True)\ninput()\n"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def start() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_and_others_stay(tmp_path: Path) -> None:
    killed, old = start()
    living, in_use = start()
    (old / "file").write_text("x")
    (tmp_path / "servesim-notes").mkdir()  # not ours: it has no lock
    killed.kill()
    killed.communicate()
    with ScratchFolder() as name:
        assert not old.exists()
        assert in_use.exists()
        assert sorted(os.listdir(tmp_path)) == sorted([in_use.name, Path(name).name, "servesim-notes"])
    living.communicate("\n")
    assert os.listdir(tmp_path) == ["servesim-notes"]


def test_a_folder_can_be_removed_twice(tmp_path: Path) -> None:
    folder = ScratchFolder()
    folder.cleanup()
    folder.cleanup()
    assert os.listdir(tmp_path) == []
