"""Common parts of the tests: the folders of the recordings and of the large data."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = ROOT / "tests" / "recordings"  # decisions of real engines; see its README
SHARED = ROOT.parent / "shared"  # data outside the repository

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs like this; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def recordings() -> Path:
    """Return the folder of the recordings of real engines."""
    return RECORDINGS


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the data folder next to the checkout; skip the test if it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the data in ../shared/data, which is absent")
    return SHARED
