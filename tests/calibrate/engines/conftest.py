"""The worker with the installed engine: one serves the commands of all tests of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from servesim.calibrate.engines import policy


@pytest.fixture(scope="module", autouse=True)
def _one_worker_per_file() -> Iterator[None]:
    yield
    policy.close((os.getpid(), "vllm"))
    policy.SETTINGS.clear()
