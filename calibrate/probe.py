"""Measure a device's steps over the grid: shapes shuffled, each repeated until its median is known well enough.

Runs inside the worker, next to the device: Python 3.9, the standard library and whatever the backend needs. Repeating
one shape under-measures it, so every round visits all open points in another order.
"""

from __future__ import annotations

import csv
import gc
import io
import math
import random
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

from .backend import Backend, OutOfMemory, Row
from .grid import GEARS, Point, grid

COLUMNS = (
    "kind", "prefill_rows", "prefill_tokens", "prefill_live", "squares", "cross", "decode_rows", "decode_live",
    "context", "swapped", "seconds", "point", "round", "order", "flagged", "failed",
)  # fmt: skip
FEWEST, MOST = 5, 40  # samples of a point
OUTLIER = 1.5  # times the median
LONG = 1024  # prompt tokens of a step


class Probe:
    """One sitting: points, their samples so far, and what is left of the time."""

    def __init__(self, backend: Backend, args: dict[str, Any], emit: Callable[[Any], None]) -> None:
        self.backend = backend
        self.emit = emit
        self.about = backend.describe()
        self.size = int(self.about["block_size"])
        self.blocks = int(self.about["blocks"])
        self.vocab = int(self.about["model"]["vocab"])
        longest = min(int(self.about["model"]["context"]), int(args.get("longest", 1 << 30)))
        gears = self.about.get("gears") or GEARS
        most_rows, most_tokens = int(args.get("most_rows", 64)), int(args.get("most_tokens", 2048))
        host = int(self.about.get("host_blocks") or 0)
        self.points = grid(most_rows, most_tokens, longest, host, gears, int(args.get("seed", 0)))
        self.gears = sorted(gears)
        self.precision = float(args.get("precision", 0.01))
        self.chance = random.Random(f"probe order {args.get('seed', 0)}")
        self.rows: list[dict[str, Any]] = list(args.get("resume") or ())
        self.seconds: dict[int, list[float]] = {place: [] for place in range(len(self.points))}
        self.failed: set[int] = set()
        for row in self.rows:
            self._note(int(row["point"]), None if row["failed"] else float(row["seconds"]))
        self.begun = time.perf_counter()
        self.budget = float(args.get("budget", 120.0))

    def run(self) -> None:
        """Go round until every median is known or the time is up; an interruption keeps what there is."""
        self._warm_up()
        round_number = 0
        while not self._late():
            open_points = [place for place in self.seconds if not self._known(place)]
            if not open_points:
                return
            self.chance.shuffle(open_points)
            # Long prompts heat a device up and pull its clock down: they come last, away from the short steps.
            open_points.sort(key=lambda place: self.points[place].rows * self.points[place].tokens > LONG)
            for order, place in enumerate(open_points):
                if self._late():
                    return
                self._sample(place, round_number, order)
            round_number += 1
            self._tell(round_number)

    def _warm_up(self) -> None:
        for point in self.points[:: max(1, len(self.points) // 12)]:
            try:
                self._take(point)
            except OutOfMemory:
                continue

    def _late(self) -> bool:
        return time.perf_counter() - self.begun > self.budget

    def _known(self, place: int) -> bool:
        """Whether a point's median has a standard error below the precision, or it is no use to go on."""
        seconds = self.seconds[place]
        if place in self.failed or len(seconds) >= MOST:
            return True
        if len(seconds) < FEWEST:
            return False
        ordered = sorted(seconds)
        count = len(ordered)
        spread = ordered[(3 * count) // 4] - ordered[count // 4]
        return 0.93 * spread / math.sqrt(count) < self.precision * ordered[count // 2]

    def _sample(self, place: int, round_number: int, order: int) -> None:
        point = self.points[place]
        row: dict[str, Any] = {**self._shape(point), "point": place, "round": round_number, "order": order}
        try:
            row.update(seconds=self._take(point), failed="")
        except OutOfMemory as error:
            row.update(seconds="", failed=" ".join(str(error).split()) or "out of memory")
        row["flagged"] = ""
        self.rows.append(row)
        self._note(place, None if row["failed"] else row["seconds"])

    def _note(self, place: int, seconds: Optional[float]) -> None:
        if seconds is None:
            self.failed.add(place)
        elif place in self.seconds:
            self.seconds[place].append(seconds)

    def _take(self, point: Point) -> float:
        """Run a point once; return its seconds. A swap goes out and in, and half of that is one copy."""
        if point.kind == "swap":
            pairs = [(1 + block, block) for block in range(point.blocks)]
            start = time.perf_counter()
            self.backend.swap_out(pairs)
            self.backend.swap_in([(host, device) for device, host in pairs])
            self.backend.synchronize()
            return (time.perf_counter() - start) / 2
        rows = self._rows(point)
        self.backend.synchronize()
        start = time.perf_counter()
        self.backend.step(rows)
        self.backend.synchronize()
        return time.perf_counter() - start

    def _rows(self, point: Point) -> list[Row]:
        """Return rows of random tokens over blocks of their own as far as there are enough."""
        lengths = [(point.tokens, point.cached)] * point.rows + [(1, point.context)] * point.decoding
        rows, next_block = [], self.chance.randrange(self.blocks)
        for tokens, cached in lengths:
            held = -(-(tokens + cached) // self.size)
            table = [1 + (next_block + place) % (self.blocks - 1) for place in range(held)]
            next_block += held
            rows.append(Row([self.chance.randrange(1, self.vocab) for _ in range(tokens)], cached, table))
        return rows

    def _shape(self, point: Point) -> dict[str, Any]:
        live = point.decoding
        return {
            "kind": point.kind,
            "prefill_rows": point.rows,
            "prefill_tokens": point.rows * point.tokens,
            "prefill_live": point.rows * point.tokens,
            "squares": point.rows * point.tokens**2,
            "cross": point.rows * point.tokens * point.cached,
            "decode_rows": live,
            "decode_live": live,
            "context": live * point.context,
            "swapped": point.blocks,
        }

    def _tell(self, round_number: int) -> None:
        known = sum(self._known(place) for place in self.seconds)
        spent = time.perf_counter() - self.begun
        self.emit({
            "round": round_number, "known": known, "points": len(self.points), "samples": len(self.rows),
            "failed": len(self.failed), "seconds": spent, "left": max(0.0, self.budget - spent),
        })  # fmt: skip

    def flag(self) -> None:
        """Mark outliers; they stay in the file."""
        medians = {place: sorted(seconds)[len(seconds) // 2] for place, seconds in self.seconds.items() if seconds}
        for row in self.rows:
            median = medians.get(int(row["point"]))
            if median and row["seconds"] != "" and float(row["seconds"]) > OUTLIER * median:
                row["flagged"] = "outlier"


def run(backend: Backend, args: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Measure; return every sample as CSV, what the device is, and how it went."""
    probe = Probe(backend, args, emit)
    interrupted = False
    gc.collect()
    gc.disable()  # a collection in the middle of a step would be measured as the device's
    try:
        probe.run()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        gc.enable()
    probe.flag()
    return {
        "csv": as_csv(probe.rows),
        "about": probe.about,
        "points": len(probe.points),
        "known": sum(probe._known(place) for place in probe.seconds),
        "failed": sorted(probe.failed),
        "interrupted": interrupted,
        "seconds": time.perf_counter() - probe.begun,
    }


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return samples as the text of a samples.csv."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
