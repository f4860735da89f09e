"""The progress of a probe moves, and ends at the end of the points or of the time."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.probe import session

from ...pseudo_terminal import on_terminal


def report(**changes: Any) -> dict[str, Any]:
    return {"known": 0, "points": 50, "samples": 7, "failed": 0, "seconds": 30.0, "left": 90.0, **changes}


def test_the_fraction_is_that_of_the_time_or_of_the_points() -> None:
    assert session.fraction_done(report()) == 0.25
    assert session.fraction_done(report(known=40)) == 0.8
    assert session.fraction_done(report(seconds=130.0, left=0.0)) == 1.0


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_the_bar_moves_on_a_terminal(tmp_path: Path) -> None:
    words = ["calibrate", "probe", "--backend", "fake", "--budget", "4", "--no-fit", "-o", str(tmp_path / "out")]
    text = on_terminal([*words, "--max-rows", "4", "--max-tokens", "128", "--precision", "0.01%"], columns=140)
    shown = [int(number) for number in re.findall(r"probe: +(\d+)%\|", text)]
    assert len(set(shown)) >= 3 and shown == sorted(shown)
    assert re.search(r"\d+/\d+ points precise, \d+ samples.*, at most \d+ s left", text)
