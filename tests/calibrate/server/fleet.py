"""A fleet of emulated servers for the tests: `sim serve --replicas N` in a process of its own, with its workers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...events import PATIENCE_S
from ...warm import sim

FLEET = "SERVESIM_TEST_FLEET"  # in the environment of its processes: the file of its scenario


@contextmanager
def serving_fleet(scenario: Path, replicas: int) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """Run the servers on free ports; yield their addresses and the process."""
    command = [sim(), "serve", str(scenario), "--backend", "fake", "--port", "0", "--replicas", str(replicas)]
    environment = {**os.environ, FLEET: str(scenario)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield [process.stdout.readline().strip().rpartition(" ")[2] for _ in range(replicas)], process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
