"""A worker whose backend the tests call step by step: backends also run under other interpreters."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from servesim.calibrate.device.backend import Row
from servesim.calibrate.device.worker_client import Worker

SCRIPT = Path(__file__).with_name("stepping_worker_script.py")


def worker_python(folder: Path, script: Path, python: str) -> str:
    """Write an executable for --worker-python: it runs a script, which starts the worker script."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} {shlex.quote(str(script))} "$@"\n')
    path.chmod(0o755)
    return str(path)


class SteppingWorker(Worker):
    """A worker with the calls of stepping_worker_script.py."""

    def __init__(self, backend: str = "kbk", python: Optional[str] = None, **options: Any) -> None:
        self.seconds = 0.0  # of the last step, measured in the worker
        with tempfile.TemporaryDirectory() as folder:  # the interpreter has started when the first call returns
            super().__init__(backend, worker_python(Path(folder), SCRIPT, python or sys.executable), **options)

    def step(self, rows: Sequence[Row]) -> list[int]:
        # Rows may hold arrays; JSON needs lists.
        lists = [([int(token) for token in row.tokens], int(row.position), [int(b) for b in row.table]) for row in rows]
        result = self.call("step", rows=lists)
        self.seconds = result["seconds"]
        tokens: list[int] = result["tokens"]
        return tokens

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.call("swap_out", pairs=list(pairs))

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.call("swap_in", pairs=list(pairs))
