"""A fleet of emulated servers for the tests: `sim serve --replicas N` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving_fleet(scenario: Path, replicas: int) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """Run the servers on free ports; yield their addresses and the process."""
    command = [sys.executable, "-m", "servesim", "serve", str(scenario), "--backend", "fake", "--port", "0"]
    command += ["--replicas", str(replicas)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield [process.stdout.readline().strip().rpartition(" ")[2] for _ in range(replicas)], process
    finally:
        process.terminate()
        process.communicate(timeout=300)
