"""Measure a device's steps over the grid: shapes shuffled, each repeated until its median is known well enough.

Runs inside the worker, next to the device: Python 3.9, the standard library and whatever the backend needs. Repeating
one shape under-measures it, so every round visits all open points in another order. Their rows are made beforehand:
a device that waits for its host cools down between two steps, and runs the next one faster than a busy server's would.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import json
import math
import random
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Callable, Optional

from servesim.calibrate.device.backend import Backend, OutOfMemory, Row, shape

from .grid import GEARS, Point, grid, lengths

COLUMNS = (
    "kind", "prefill_rows", "prefill_tokens", "prefill_live", "squares", "cross", "decode_rows", "decode_live",
    "context", "swapped", "seconds", "point", "round", "order", "flagged", "failed",
)  # fmt: skip
FEWEST, MOST = 8, 60  # samples of a point
OUTLIER = 1.5  # times the median
WEIGHTS = (0, 64, 128, 192, 256, 384, 512, 1024, 2048)  # tokens up to which steps work the device alike
FAILURES = (RuntimeError, MemoryError, ValueError)  # of one point; OutOfMemory is the first of them
TELL = 1.0  # seconds after which the parent is given what has been measured
GIVE_UP = 12  # points that fail one after another: the device is gone


class FrontEnd:
    """What an HTTP front end does meanwhile in the same process: a thread that writes and reads answers as JSON."""

    def __enter__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        answer = {"event": "message", "data": [{"generated_text": "token " * 8, "tokens": list(range(16))}]}
        while not self._over.is_set():
            json.loads(json.dumps(answer))


def reason(error: BaseException) -> str:
    """Return why a point failed, in one line."""
    said = " ".join(str(error).split())[:200]
    return said or type(error).__name__ if isinstance(error, OutOfMemory) else f"{type(error).__name__}: {said}"


class Probe:
    """One sitting: points, their samples so far, and what is left of the time."""

    def __init__(self, backend: Backend, args: dict[str, Any], emit: Callable[[Any], None]) -> None:
        self.backend = backend
        self.emit = emit
        self.about = backend.describe()
        self.size = int(self.about["block_size"])
        self.blocks = int(self.about["blocks"])
        self.vocab = int(self.about["model"]["vocab"])
        self.longest = longest = min(int(self.about["model"]["context"]), int(args.get("longest", 1 << 30)))
        gears = self.about.get("gears") or GEARS
        most_rows, most_tokens = int(args.get("most_rows", 64)), int(args.get("most_tokens", 2048))
        host = int(self.about.get("host_blocks") or 0)
        self.points = grid(most_rows, most_tokens, longest, host, gears, int(args.get("seed", 0)))
        self.gears = sorted(gears)
        self.precision = float(args.get("precision", 0.01))
        self.rows: list[dict[str, Any]] = list(args.get("resume") or ())
        self.seed = int(args.get("seed", 0))
        self.chance = random.Random(f"probe order {self.seed} {len(self.rows)}")
        self.built: dict[int, list[Row]] = {}
        self.rounds: Optional[int] = args.get("rounds")  # of one call, at most
        self.round = 0
        self.seconds: dict[int, list[float]] = {place: [] for place in range(len(self.points))}
        self.failed: set[int] = set()
        for row in self.rows:
            self._note(int(row["point"]), None if row["failed"] else float(row["seconds"]))
        self.begun = self._told = time.perf_counter()  # again when the rows are made
        self.budget = float(args.get("budget", 120.0))
        self._sent = len(self.rows)  # of them, the parent has these
        self._failing = 0  # points that have failed since one went well

    def run(self) -> None:
        """Go round until every median is known or the time is up; an interruption keeps what there is.

        It can be called again: it then goes on.
        """
        if not self.built:
            for place, point in enumerate(self.points):
                self.built[place] = self._rows(point, random.Random(f"probe rows {self.seed} {place}"))
            self.begun = time.perf_counter()
            self._warm_up()
        last = None if self.rounds is None else self.round + self.rounds
        while not self._late() and self.round != last:
            open_points = [place for place in self.seconds if not self._known(place)]
            if not open_points:
                return
            self.chance.shuffle(open_points)
            open_points.sort(key=lambda place: weight(self.points[place]))
            for order, place in enumerate(open_points):
                if self._late():
                    return
                self._sample(place, self.round, order)
            self.round += 1
            self._tell(self.round)

    def _warm_up(self) -> None:
        for place in range(0, len(self.points), max(1, len(self.points) // 12)):
            with contextlib.suppress(*FAILURES):
                self._take(self.points[place], self.built[place])

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
        point, rows = self.points[place], self.built[place]
        step = shape(rows[: point.rows], rows[point.rows :], point.blocks)
        row: dict[str, Any] = {"kind": point.kind, **step._asdict(), "point": place, "round": round_number}
        row.update(order=order, flagged="")
        try:
            row.update(seconds=self._take(point, rows), failed="")
            self._failing = 0
        except FAILURES as error:
            row.update(seconds="", failed=reason(error))
            self._failing += 1
        self.rows.append(row)
        self._note(place, None if row["failed"] else row["seconds"])
        if time.perf_counter() - self._told > TELL:
            self._tell(round_number)
        if self._failing >= GIVE_UP:
            raise RuntimeError(f"{self._failing} points failed one after another, the last with: {row['failed']}")

    def _note(self, place: int, seconds: Optional[float]) -> None:
        if seconds is None:
            self.failed.add(place)
        elif place in self.seconds:
            self.seconds[place].append(seconds)

    def _take(self, point: Point, rows: Sequence[Row]) -> float:
        """Run a point once; return its seconds. A swap goes out and in, and half of that is one copy."""
        if point.kind == "swap":
            pairs = [(1 + block, block) for block in range(point.blocks)]
            start = time.perf_counter()
            self.backend.swap_out(pairs)
            self.backend.swap_in([(host, device) for device, host in pairs])
            self.backend.synchronize()
            return (time.perf_counter() - start) / 2
        self.backend.synchronize()
        with FrontEnd() if point.kind == "busy" else contextlib.nullcontext():
            start = time.perf_counter()
            self.backend.step(rows)
            self.backend.synchronize()
            return time.perf_counter() - start

    def _rows(self, point: Point, chance: random.Random) -> list[Row]:
        """Return rows of random tokens over blocks of their own as far as there are enough."""
        rows, next_block = [], chance.randrange(self.blocks)
        for tokens, cached in lengths(point, self.longest, chance):
            held = -(-(tokens + cached) // self.size)
            table = [1 + (next_block + place) % (self.blocks - 1) for place in range(held)]
            next_block += held
            rows.append(Row(array("i", chance.choices(range(1, self.vocab), k=tokens)), cached, array("i", table)))
        return rows

    def _tell(self, round_number: int) -> None:
        """Report how it goes, with the samples taken since the last report: the parent keeps them at once."""
        known = sum(self._known(place) for place in self.seconds)
        self._told = time.perf_counter()
        spent = self._told - self.begun
        self.emit({
            "round": round_number, "known": known, "points": len(self.points), "samples": len(self.rows),
            "failed": len(self.failed), "seconds": spent, "left": max(0.0, self.budget - spent),
            "rows": [[row.get(name, "") for name in COLUMNS] for row in self.rows[self._sent :]],
        })  # fmt: skip
        self._sent = len(self.rows)

    def flag(self) -> None:
        """Mark outliers; they stay in the file."""
        medians = {place: sorted(seconds)[len(seconds) // 2] for place, seconds in self.seconds.items() if seconds}
        for row in self.rows:
            median = medians.get(int(row["point"]))
            if median and row["seconds"] != "" and float(row["seconds"]) > OUTLIER * median:
                row["flagged"] = "outlier"


def weight(point: Point) -> int:
    """Return how hard a step works the device: heavy ones pull its clock down, and run one after another in real life.

    A round visits its points by weight, shuffled within each, so that a step meets the device as its like would.
    """
    return bisect_left(WEIGHTS, point.rows * point.tokens + point.decoding) if point.rows else 0


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
    writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
