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
    """Return the output of a command on a terminal with 100 columns."""
    import fcntl
    import termios

    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = sweeps.start(*command, stdout=inside, stderr=inside)
    os.close(inside)
    output = b""
    while True:
        try:
            data = os.read(outside, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not data:
            break
        output += data
    os.close(outside)
    assert process.wait() == 0, output.decode()
    return output.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_a_terminal_gets_a_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    file = sweeps.sweep_file(tmp_path, replications=12)
    text = on_terminal(["sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1", "--no-report"])
    assert re.search(r"sweep: +\d+%\|.*\| \d+/84 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+(run/s|s/run)\]", text)
    assert re.search(r"sweep: 100%\|.*\| 84/84 \[", text)
