"""Run `sim` in this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from servesim.cli import main


class Said(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    error: str


def run_sim(capsys: pytest.CaptureFixture[str], *args: str) -> Said:
    """Run a command; return its exit code and what it printed."""
    capsys.readouterr()
    try:
        code = main(args)
    except SystemExit as stop:
        code = int(stop.code or 0)
    return Said(code, *capsys.readouterr())
