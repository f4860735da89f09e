"""Timing helpers for gpu_check.py and gpu_tune.py: a loaded torch backend and its step times in milliseconds."""

from __future__ import annotations

import importlib.util
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def find_package() -> None:
    """Make servesim importable from the folders of the checkout if it is not installed."""
    if importlib.util.find_spec("servesim"):
        return
    for name, folder in (("servesim", "sim"), ("servesim.calibrate", "calibrate")):
        spec = importlib.util.spec_from_file_location(
            name, ROOT / folder / "__init__.py", submodule_search_locations=[str(ROOT / folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


find_package()
import numpy as np  # noqa: E402
import torch  # noqa: E402
from servesim.calibrate.device.backend import Row  # noqa: E402
from servesim.calibrate.device.torch.backend import TorchBackend  # noqa: E402


class Bench:
    """A loaded backend and rows to time on it."""

    def __init__(self, backend: TorchBackend, seed: int = 0) -> None:
        self.backend, self.rng = backend, random.Random(seed)
        self.pool = self.rng.sample(range(backend.blocks), backend.blocks)

    def rows(self, chunks: list[tuple[int, int]]) -> list[Row]:
        """Return rows of (tokens, cached context) in random blocks; rows share blocks if the pool is too small."""
        rows, offset = [], self.rng.randrange(len(self.pool))
        for tokens, context in chunks:
            blocks = -(-(tokens + context) // self.backend.block_size)
            table = array("i", [self.pool[(offset + index) % len(self.pool)] for index in range(blocks)])
            offset += blocks
            rows.append(Row(self.rng.choices(range(self.backend.model.vocab), k=tokens), context, table))
        return rows

    def time(self, chunks: list[tuple[int, int]]) -> float:
        """Return the milliseconds of a step with new block tables and tokens."""
        rows = self.rows(chunks)
        return time_ms(lambda: self.backend.step(rows))

    def time_shuffled(self, shapes: dict[Any, list[tuple[int, int]]], repeats: int = 20) -> dict[Any, list[float]]:
        """Return the times of several shapes without the first repeat.

        The order changes with every repeat: a shape that runs twice in a row is faster the second time.
        """
        times: dict[Any, list[float]] = {name: [] for name in shapes}
        for repeat in range(repeats + 1):
            for name in self.rng.sample(list(shapes), len(shapes)):
                milliseconds = self.time(shapes[name])
                times[name] += [milliseconds] if repeat else []
        return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def spread(times: list[float]) -> float:
    """Return p90 over median."""
    return float(np.percentile(times, 90)) / median(times)


def time_ms(work: Callable[[], Any]) -> float:
    """Return the wall-clock milliseconds of a call."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def device_time(work: Callable[[], Any], repeats: int) -> list[float]:
    """Return the milliseconds between device events before and after the work, per repeat."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times
