"""Commands with an installed engine in the tests: their scenario, the interpreter of the engine, and their results."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

FAKE = Path(__file__).parent / "fake"
SCENARIO = """
policy: {name: vllm-v1, enable_prefix_caching: false, max_num_seqs: 12, max_num_batched_tokens: 64}
engine: {num_blocks: 40, block_size: 4, max_model_len: 120}
workload:
  {requests: 60, arrivals: {kind: poisson, rate: 20}, lengths: {prompt: [1, 60], output: [1, 40]}, limit: 30}
profile: {kind: linear, base: 0.01, prefill_token: 0.001, decode_row: 0.002}
"""


def interpreter(folder: Path, packages: Path = FAKE) -> str:
    """Write an interpreter that finds an engine in a folder; return its path."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    file.chmod(0o755)
    return str(file)


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name / "requests.csv").open() as file:
        return list(csv.DictReader(file))
