"""Measure the steps of the grid on a device. Each is repeated until the standard error of its median is small enough.

It runs in the worker: Python 3.9, the standard library and the packages of the backend. A shape repeated in a row
measures too fast, so every round visits all open points in a new order. All rows are built beforehand: a device that
waits for its host cools down between two steps and runs the next one faster than on a busy server.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, Optional

from servesim.calibrate.device.backend import ROW_BUCKETS, STEP_FAILURES, Backend, OutOfMemory, Row, shape_of_rows
from servesim.calibrate.device.counters import DeviceSampler, counters_to_json
from servesim.core import Shape

from .grid import Point, grid, lengths
from .power import measure_power
from .token_selection import Medians, measure_sampling

COLUMNS = ("kind", *Shape._fields, "seconds", "point", "round", "order", "flagged", "failed")
MIN_SAMPLES, MAX_SAMPLES = 8, 60  # per point
OUTLIER_RATIO = 1.5  # samples above this multiple of the median are flagged
LOAD_CLASSES = (0, 64, 128, 192, 256, 384, 512, 1024, 2048)  # upper bounds, in tokens per step
REPORT_INTERVAL_S = 1.0  # seconds between two reports to the parent
SAMPLING_PART = 0.1  # of the budget, for the selection of tokens
MAX_FAILED_POINTS = 12  # failed points in a row after which the probe ends: the device is lost


def failure_reason(error: BaseException) -> str:
    """Return the error of a failed point in one line."""
    message = " ".join(str(error).split())[:200]
    return message or type(error).__name__ if isinstance(error, OutOfMemory) else f"{type(error).__name__}: {message}"


class Probe:
    """One probe session in the worker: the points, their samples so far, and the time left."""

    def __init__(self, backend: Backend, args: dict[str, Any], emit: Callable[[Any], None]) -> None:
        self.backend = backend
        self.emit = emit
        self.about = backend.describe()
        self.block_size = int(self.about["block_size"])
        self.blocks = int(self.about["blocks"])
        self.vocab = int(self.about["model"]["vocab"])
        self.max_seq_len = min(int(self.about["model"]["context"]), args.get("max_seq_len", 1 << 30))
        row_buckets = self.about.get("row_buckets") or ROW_BUCKETS
        self.max_rows, self.seed = args.get("max_rows", 64), args.get("seed", 0)
        sizes = self.max_rows, args.get("max_tokens", 2048), self.max_seq_len
        self.points = grid(*sizes, self.about["host_blocks"], row_buckets, self.seed)
        self.precision = float(args.get("precision", 0.01))
        self.rows: list[dict[str, Any]] = list(args.get("resume") or ())
        self.rng = random.Random(f"probe order {self.seed} {len(self.rows)}")
        self.rows_by_point: dict[int, list[Row]] = {}
        self.rounds: Optional[int] = args.get("rounds")  # maximum per call of `run`
        self.round = 0
        self.seconds: dict[int, list[float]] = {index: [] for index in range(len(self.points))}
        self.failed: set[int] = set()
        for row in self.rows:
            self._add_sample(int(row["point"]), None if row["failed"] else float(row["seconds"]))
        self.started_at = self._reported_at = time.perf_counter()  # `run` sets it again when the rows are built
        self.budget = float(args.get("budget", 120.0))
        self._rows_reported = len(self.rows)  # number of rows that the parent already has
        self._failed_in_a_row = 0

    def run(self) -> None:
        """Measure in rounds until every median is known or the time is up. Call it again to continue."""
        if not self.rows_by_point:
            for index, point in enumerate(self.points):
                self.rows_by_point[index] = self._rows(point, random.Random(f"probe rows {self.seed} {index}"))
            self.started_at = time.perf_counter()
            for index in range(0, len(self.points), max(1, len(self.points) // 12)):  # warm-up
                with contextlib.suppress(*STEP_FAILURES):
                    self._time_step(self.points[index], self.rows_by_point[index])
        last = None if self.rounds is None else self.round + self.rounds
        while not self._out_of_time() and self.round != last:
            open_points = [index for index in self.seconds if not self._is_known(index)]
            if not open_points:
                return
            self.rng.shuffle(open_points)
            open_points.sort(key=lambda point: load_class(self.points[point]))
            for order, index in enumerate(open_points):
                if self._out_of_time():
                    return
                self._sample(index, order)
            self.round += 1
            self._report()

    def _out_of_time(self) -> bool:
        return time.perf_counter() - self.started_at > self.budget

    def _is_known(self, index: int) -> bool:
        """Return whether a point is done: its median is precise enough, it failed, or it has MAX_SAMPLES."""
        seconds = self.seconds[index]
        if index in self.failed or len(seconds) >= MAX_SAMPLES:
            return True
        if len(seconds) < MIN_SAMPLES:
            return False
        ordered = sorted(seconds)
        count = len(ordered)
        spread = ordered[(3 * count) // 4] - ordered[count // 4]
        return 0.93 * spread / math.sqrt(count) < self.precision * ordered[count // 2]

    def _sample(self, index: int, order: int) -> None:
        point, rows = self.points[index], self.rows_by_point[index]
        shape = shape_of_rows(rows[: point.rows], rows[point.rows :], point.blocks)
        row: dict[str, Any] = {"kind": point.kind, **shape._asdict(), "point": index, "round": self.round}
        row.update(order=order, flagged="")
        try:
            row.update(seconds=self._time_step(point, rows), failed="")
            self._failed_in_a_row = 0
        except STEP_FAILURES as error:
            row.update(seconds="", failed=failure_reason(error))
            self._failed_in_a_row += 1
        self.rows.append(row)
        self._add_sample(index, None if row["failed"] else row["seconds"])
        if time.perf_counter() - self._reported_at > REPORT_INTERVAL_S:
            self._report()
        if self._failed_in_a_row >= MAX_FAILED_POINTS:
            raise RuntimeError(f"{self._failed_in_a_row} points failed in a row, the last with: {row['failed']}")

    def _add_sample(self, index: int, seconds: Optional[float]) -> None:
        if seconds is None:
            self.failed.add(index)
        elif index in self.seconds:
            self.seconds[index].append(seconds)

    def _time_step(self, point: Point, rows: Sequence[Row]) -> float:
        """Run a point once; return its seconds. For a swap, return half the time of a swap out and in."""
        if point.kind == "swap":
            pairs = [(1 + block, block) for block in range(point.blocks)]
            start = time.perf_counter()
            self.backend.swap_out(pairs)
            self.backend.swap_in([(host, device) for device, host in pairs])
            self.backend.synchronize()
            return (time.perf_counter() - start) / 2
        self.backend.synchronize()
        start = time.perf_counter()
        self.backend.step(rows)
        self.backend.synchronize()
        return time.perf_counter() - start

    def steps_by_kind(self) -> dict[str, Sequence[Callable[[], Any]]]:
        """Return functions that run the points that did not fail, by kind of step."""
        steps: dict[str, list[Callable[[], Any]]] = {}
        for index, rows in self.rows_by_point.items():
            if index not in self.failed:
                steps.setdefault(self.points[index].kind, []).append(partial(self._time_step, self.points[index], rows))
        return dict(steps)

    def _rows(self, point: Point, rng: random.Random) -> list[Row]:
        """Return rows of random tokens. Rows use different blocks while there are enough."""
        rows, next_block = [], rng.randrange(self.blocks)
        for tokens, cached in lengths(point, self.max_seq_len, rng):
            count = -(-(tokens + cached) // self.block_size)
            table = [1 + (next_block + index) % (self.blocks - 1) for index in range(count)]
            next_block += count
            rows.append(Row(array("i", rng.choices(range(1, self.vocab), k=tokens)), cached, array("i", table)))
        return rows

    def _report(self) -> None:
        """Report the progress and the samples since the last report; the parent writes them to disk at once."""
        known = sum(self._is_known(index) for index in self.seconds)
        self._reported_at = time.perf_counter()
        spent = self._reported_at - self.started_at
        self.emit({
            "round": self.round, "known": known, "points": len(self.points), "samples": len(self.rows),
            "failed": len(self.failed), "seconds": spent, "left": max(0.0, self.budget - spent),
            "rows": as_rows(self.rows[self._rows_reported :]),
        })  # fmt: skip
        self._rows_reported = len(self.rows)

    def flag(self) -> None:
        """Flag outliers. They stay in the file."""
        medians = {index: sorted(seconds)[len(seconds) // 2] for index, seconds in self.seconds.items() if seconds}
        for row in self.rows:
            median = medians.get(int(row["point"]))
            if median and row["seconds"] != "" and float(row["seconds"]) > OUTLIER_RATIO * median:
                row["flagged"] = "outlier"


def load_class(point: Point) -> int:
    """Return the load class of a point. Heavy steps lower the device clock, and on a server they run in a row.

    A round visits its points by class, shuffled within each class. Each step then meets a device clock as on a server.
    """
    return bisect_left(LOAD_CLASSES, point.rows * point.tokens + point.decoding) if point.rows else 0


def run(backend: Backend, args: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Measure; return all samples as rows of a table, the description of the backend, and counts."""
    probe = Probe(backend, args, emit)
    interrupted, sampling, power = False, Medians(), None
    gc.collect()
    gc.disable()  # a garbage collection during a step would be measured as device time
    try:
        with DeviceSampler() as sampler:
            probe.run()
            sampling = measure_sampling(backend, probe.max_rows, SAMPLING_PART * probe.budget)
            power = measure_power(probe.steps_by_kind(), sampler)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        gc.enable()
    probe.flag()
    return {
        "rows": as_rows(probe.rows),
        "about": probe.about,
        "points": len(probe.points),
        "known": sum(probe._is_known(index) for index in probe.seconds),
        "failed": sorted(probe.failed),
        "interrupted": interrupted,
        "sampling": sampling,
        "seconds": time.perf_counter() - probe.started_at,
        "counters": counters_to_json(sampler, probe.started_at),
        "power": power,
    }


def as_rows(samples: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return samples as rows of samples.csv."""
    return [[sample.get(name, "") for name in COLUMNS] for sample in samples]
