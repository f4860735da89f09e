"""Run `sim` on a pseudo terminal, with a width and an environment."""

from __future__ import annotations

import os
import re
import struct
from typing import Optional

import pytest

from .study import sweeps


def on_terminal(
    command: list[str], columns: int = 100, code: int = 0, env: Optional[dict[str, str]] = None, stdin: bool = False
) -> str:
    """Return the output of a command on a terminal with this many columns; `stdin`: it also reads from there."""
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")
    import fcntl
    import termios

    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    settings = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment = {**settings, "TERM": "xterm", **(env or {})}
    process = sweeps.start(*command, stdout=inside, stderr=inside, env=environment, stdin=inside if stdin else None)
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
    assert process.wait() == code, output.decode()
    return output.decode()


def without_colours(text: str) -> str:
    """Return a text without the codes of colours."""
    return re.sub(r"\033\[[\d;]*m", "", text)
