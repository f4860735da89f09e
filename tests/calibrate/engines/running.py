"""Commands with an installed engine in the tests: their scenario, their environment and their results."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

FAKE = Path(__file__).parent / "fake"
SCENARIO = """
policy: {name: vllm-v1, enable_prefix_caching: false, max_num_seqs: 12, max_num_batched_tokens: 64}
engine: {num_blocks: 40, block_size: 4, max_model_len: 120}
workload:
  {requests: 60, arrivals: {kind: poisson, rate: 20}, lengths: {prompt: [1, 60], output: [1, 40]}, limit: 30}
profile: {kind: linear, base: 0.01, prefill_token: 0.001, decode_row: 0.002}
"""


def environment(engine: Optional[Path] = FAKE, **variables: str) -> dict[str, str]:
    """Return the environment of a command that finds the engine in a folder."""
    path = os.pathsep.join(filter(None, [str(engine or ""), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "SERVESIM_VLLM_PYTHON": sys.executable, **variables}


def command(*words: str) -> list[str]:
    """Return the command line of `sim`."""
    return [sys.executable, "-m", "servesim", *words]


class Result:
    """A command that has ended."""

    def __init__(self, folder: Path, *words: str, engine: Optional[Path] = FAKE, **variables: str) -> None:
        done = subprocess.run(
            command(*words), cwd=folder, env=environment(engine, **variables), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        self.code, self.out, self.error = done.returncode, done.stdout, done.stderr
        self.lines = [line for line in self.error.splitlines() if "importing vllm" not in line]


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name / "requests.csv").open() as file:
        return list(csv.DictReader(file))
