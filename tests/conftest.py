"""Common parts of the tests: where the recordings and the large data are."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = ROOT / "tests" / "recordings"  # decisions of real engines; its README says what they are
SHARED = ROOT.parent / "shared"  # data that is no part of the repository

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background, and it inherits
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def recordings() -> Path:
    """Return the folder of the recordings of real engines, which is part of the repository."""
    return RECORDINGS


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of data beside the checkout; a test that needs it skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the data in ../shared/data, which is absent")
    return SHARED
