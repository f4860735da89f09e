"""Waiting in tests: for an event, never for a time. A slow machine only makes the wait longer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 300.0  # a wait that takes longer is a fault, not a slow machine
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str) -> T:
    """Return the first value of the condition that is true; fail with what was waited for."""
    until = time.monotonic() + PATIENCE_S
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < until, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.02)


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    """Return the next line of the standard output that contains the text; fail if the process ends without it."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        if text in line:
            return line
        seen.append(line)
    raise AssertionError(f"the process ended with {process.wait()} without a line with {text!r}: {''.join(seen)}")
