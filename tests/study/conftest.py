"""Fixtures of the tests of studies."""

from __future__ import annotations

import pytest
from servesim.study import pilot_runs


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a capacity are short where their length is not the subject: test_run_length.py tests it."""
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 200)
