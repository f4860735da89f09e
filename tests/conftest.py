"""Shared ground for the tests: where the recordings and data lie, and small servers to play with."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background, and it inherits
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recordings and data beside the checkout; tests that need it skip, aloud, where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the recordings and data in {SHARED.name}/ beside the checkout, which is absent")
    return SHARED
