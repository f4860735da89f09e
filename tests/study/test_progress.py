"""Progress on a real terminal: a bar with rate and time left."""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path

import pytest

from . import sweeps

pty = pytest.importorskip("pty", reason="needs pseudo-terminals")


def on_terminal(command: list[str]) -> str:
    """Return what a command writes to a terminal of 100 columns."""
    import fcntl
    import termios

    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = sweeps.started(*command, stdout=inside, stderr=inside)
    os.close(inside)
    found = b""
    while True:
        try:
            part = os.read(outside, 4096)
        except OSError:  # how Linux says that nobody is left at the other end
            break
        if not part:
            break
        found += part
    os.close(outside)
    assert process.wait() == 0, found.decode()
    return found.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_a_terminal_gets_a_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    file = sweeps.sweep_file(tmp_path, replications=12)
    text = on_terminal(["sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1", "--no-report"])
    assert re.search(r"sweep: +\d+%\|.*\| \d+/84 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+(run/s|s/run)\]", text)
    assert re.search(r"sweep: 100%\|.*\| 84/84 \[", text)
