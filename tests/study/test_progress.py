"""Progress on a real terminal: a bar with rate and time left."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ..pseudo_terminal import on_terminal
from ..study import sweeps


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_a_terminal_gets_a_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    file = sweeps.sweep_file(tmp_path, replications=12)
    text = on_terminal(["sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1", "--no-report"])
    assert re.search(r"sweep: +\d+%\|.*\| \d+/84 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+(run/s|s/run)\]", text)
    assert re.search(r"sweep: 100%\|.*\| 84/84 \[", text)
