"""The installation of a browser in CI never fails: the tests that need it are skipped instead."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT


@pytest.mark.parametrize(
    ("user", "install", "printed"),
    [
        ("1000", "", "chromium: not installed, and only root can install it; the tests"),
        ("0", None, "chromium: not installed, and apt-get is missing; the tests"),
        ("0", "echo first; echo 'E: no network'; exit 100", "chromium: cannot install it: E: no network; the tests"),
        ("0", "exit 0", "chromium: installed"),
    ],
    ids=["not root", "not Debian", "no network", "installed"],
)
def test_a_missing_browser_is_one_line(tmp_path: Path, user: str, install: str, printed: str) -> None:
    for name in ("bash", "mktemp", "timeout", "sh", "tail", "rm"):
        (tmp_path / name).symlink_to(Path("/usr/bin") / name)
    programs = {"id": f"echo {user}", "apt-get": install}
    for name, body in programs.items():
        if body is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
    command = ["/bin/bash", str(ROOT / ".ci" / "browser")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout.startswith(printed)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
