"""What MindIE-LLM learns from the results of its batches: the latency predictor and the dynamic batch size.

The objects are parts of the policy state. A change returns a new object; lists only grow behind what older ones use.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, Optional

from servesim.core import Queue, Request, View

REFIT: Final = 400  # decodes after which the decode fit is solved again
MAX_POINTS: Final = 1000  # decodes that it uses
MAX_GAPS: Final = 20000  # newest gaps and rows that count for the dynamic batch size
MIN_GAPS: Final = 2000  # gaps below which the mean is taken for 0
LEAST_SEATS: Final = 3
UNSIGNED: Final = 1 << 64  # a subtraction below 0 wraps around


def microseconds(seconds: float) -> int:
    """Return a time in whole microseconds, as the engine's clock gives it."""
    return int(seconds * 1e6 + 0.5)


SINGLE: Final = struct.Struct("f")


def single(number: float) -> float:
    """Round a number to single precision."""
    return float(SINGLE.unpack(SINGLE.pack(number))[0])


class Recent:
    """The newest values of a series, at most `limit` of them."""

    __slots__ = ("_counts", "_end", "_first", "_limit", "_sums")

    def __init__(self, limit: int, counts: list[int], sums: list[int], end: int = 0, first: int = 0) -> None:
        self._limit = limit
        # the number of values, and their sum, after each entry; an entry is a value and how often it came
        self._counts = counts
        self._sums = sums
        self._end = end  # index of the newest entry; those behind it are of a later state
        self._first = first  # the entries behind this one belong to the newest values completely

    @property
    def count(self) -> int:
        """The number of all values so far."""
        return self._counts[self._end]

    def added(self, value: int, times: int) -> Recent:
        """Return the series with one more value, which came several times."""
        limit, counts, sums, end, first = self._limit, self._counts, self._sums, self._end, self._first
        if len(counts) > end + 1 or end > 2 * limit:
            start = max(0, end - limit)
            counts, sums, end, first = counts[start : end + 1], sums[start : end + 1], end - start, first - start
        counts.append(counts[end] + times)
        sums.append(sums[end] + value * times)
        end += 1
        while first < end - limit or counts[first] < counts[end] - limit:
            first += 1
        return Recent(limit, counts, sums, end, first)

    def _cut_entry(self) -> tuple[int, int, int]:
        """Return what the limit leaves for the entry that belongs to the newest values in part, its value and size."""
        counts, sums, first = self._counts, self._sums, self._first
        if first <= max(0, self._end - self._limit):
            return 0, 0, 0
        size = counts[first] - counts[first - 1]
        left = self._limit - (counts[self._end] - counts[first])
        return left, (sums[first] - sums[first - 1]) // size, size

    def total(self) -> int:
        """Return the sum of the newest values."""
        left, value, _ = self._cut_entry()
        return self._sums[self._end] - self._sums[self._first] + left * value

    def defective_mean(self) -> int:
        """Return the mean of the newest values as the engine computes it.

        Its defect: of the entry that is cut, it takes the part that is too old.
        """
        left, value, size = self._cut_entry()
        total = self._sums[self._end] - self._sums[self._first] + (size - left) * value
        count = self._counts[self._end] - self._counts[self._first] + size - left
        return total // count if count else 0


# What the latency predictor notes about a round: whether it prefills, tokens of prompts, rows that decode, their blocks
Statistics = tuple[bool, int, int, int]


class LatencyFit:
    """The latency predictor. Its defect: a busy round reuses the statistics of the first round with its number."""

    __slots__ = ("counts", "decode", "intercept", "points", "slope", "statistics", "sums")

    def __init__(self) -> None:
        self.slope, self.intercept = 0.1317, 25.797  # ms per prompt token, ms
        self.decode = (0.2181, 0.0, 29.961)  # ms per sequence, ms per block, ms
        self.counts = (0, 0, 0)  # points of the prefill fit, of the decode fit, and those that `points` has
        self.sums = (0.0, 0.0, 0.0, 0.0)  # of x, y, x * x and x * y of the prefill fit, in double precision
        self.points: list[tuple[int, int, int]] = []  # sequences, blocks, ms
        self.statistics: tuple[Statistics, ...] = ()  # of the numbers that may still be booked

    def prefers_prefill(self, targets: tuple[int, int], waited: int, tokens: int, rows: int, blocks: int) -> bool:
        """Whether less of the target time of prefills is left than of that of decodes.

        The engine computes in single precision. This is slow here, so it is done only if it can matter.
        """
        (goal, decode_goal), (a, b, c) = targets, self.decode
        prefill, decode = self.slope * tokens + self.intercept, a * rows + b * blocks + c
        if goal and decode_goal:
            difference = (goal - waited - prefill) / goal - (decode_goal - decode) / decode_goal
            error = 1e-6 * ((goal + waited + prefill) / goal + (decode_goal + decode) / decode_goal)
            if difference > error or difference < -error:
                return difference < 0
        prefill = single(single(single(self.slope) * tokens) + single(self.intercept))
        return laxity(goal, goal - waited - prefill) < laxity(decode_goal, decode_goal - single(decode))

    def values(self) -> tuple[Any, ...]:
        return self.slope, self.intercept, self.decode, self.counts, self.sums, self.statistics

    def copy(self) -> LatencyFit:
        after = LatencyFit()
        after.slope, after.intercept, after.decode = self.slope, self.intercept, self.decode
        after.counts, after.sums, after.statistics = self.counts, self.sums, self.statistics
        after.points = self.points
        return after

    def decided(self, number: int, is_empty: bool, statistics: Statistics) -> LatencyFit:
        """Note a round, the `number`-th without a result. An empty one never gets a result: it raises all numbers."""
        stored = self.statistics
        if len(stored) < number:
            stored = (*stored, statistics)
        elif not is_empty:
            return self
        after = self.copy()
        after.statistics = stored[1:] if is_empty else stored
        return after

    def booked(self, number: int, ms: int) -> LatencyFit:
        """Note a result of the newest round."""
        is_prefill, tokens, rows, blocks = self.statistics[number - 1]
        return self._with_prefill(tokens, ms) if is_prefill else self._with_decode((rows, blocks, ms))

    def _with_prefill(self, x: int, y: int) -> LatencyFit:
        """Least squares. A point is kept if slope and intercept stay above 0; one with the only x is just counted."""
        n, slope, intercept = self.counts[0] + 1, self.slope, self.intercept
        sx, sy, sxx, sxy = self.sums[0] + x, self.sums[1] + y, self.sums[2] + x * x, self.sums[3] + x * y
        sums, divisor = (sx, sy, sxx, sxy), n * sxx - sx * sx
        if n > 1 and not divisor:
            sums = self.sums
        elif n > 1:
            slope = (n * sxy - sx * sy) / divisor
            intercept = (sy * sxx - sx * sxy) / divisor  # so it is exactly 0 if all points are on one line through 0
            if slope <= 0 or intercept <= 0:
                if n > 2:
                    return self
                n, sums, slope, intercept = 0, (0.0, 0.0, 0.0, 0.0), self.slope, self.intercept
        after = self.copy()
        after.slope, after.intercept, after.counts, after.sums = slope, intercept, (n, *self.counts[1:]), sums
        return after

    def _with_decode(self, point: tuple[int, int, int]) -> LatencyFit:
        after, (prefills, decodes, used) = self.copy(), self.counts
        points = self.points if len(self.points) == used else self.points[:used]
        points.append(point)
        if not (decodes + 1) % REFIT:
            points = points[-MAX_POINTS:]
            after._fit_decode(points)
        after.points, after.counts = points, (prefills, decodes + 1, len(points))
        return after

    def _fit_decode(self, points: list[tuple[int, int, int]]) -> None:
        rows = [[0.0] * 4 for _ in range(3)]
        for sequences, blocks, ms in points:
            for index, value in enumerate((sequences, blocks, 1)):
                for column, other in enumerate((sequences, blocks, 1, ms)):
                    rows[index][column] += value * other
        solution = solve(rows)
        if solution is not None and min(solution) > 0:
            self.decode = (solution[0], solution[1], solution[2])


def solve(rows: list[list[float]]) -> Optional[list[float]]:
    """Solve three linear equations with Cramer's rule; None if they have no single solution."""
    whole = determinant([row[:3] for row in rows])
    if abs(whole) < 1e-9:
        return None
    return [determinant([[*row[:i], row[3], *row[i + 1 : 3]] for row in rows]) / whole for i in range(3)]


def determinant(rows: list[list[float]]) -> float:
    """Return the determinant of a 3x3 matrix."""
    (a, b, c), (d, e, f), (g, h, i) = rows
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


class DynamicBatch:
    """The dynamic batch size: it moves the seats of a round towards the expected time of a decode."""

    __slots__ = ("gaps", "is_odd", "low", "prefill_seats", "rows", "seats", "up")

    def __init__(
        self, seats: int, prefill_seats: int, rows: Optional[Recent] = None, gaps: Optional[Recent] = None
    ) -> None:
        self.seats = seats
        self.prefill_seats = prefill_seats
        self.low, self.up = LEAST_SEATS, seats  # bounds of the search
        self.is_odd = False  # whether the last update was odd
        # sequences of decode rounds, each as often as it is large; ms between two tokens of a request
        self.rows = rows or Recent(MAX_GAPS, [0], [0])
        self.gaps = gaps or Recent(MAX_GAPS, [0], [0])

    def values(self) -> tuple[Any, ...]:
        return (
            self.seats, self.prefill_seats, self.low, self.up, self.is_odd, self.rows.count, self.rows.total(),
            self.gaps.count, self.gaps.total(),
        )  # fmt: skip

    def copy(self) -> DynamicBatch:
        after = DynamicBatch(self.seats, self.prefill_seats, self.rows, self.gaps)
        after.low, after.up, after.is_odd = self.low, self.up, self.is_odd
        return after

    def update(self, most: int, target: int, live: int, waiting: int) -> None:
        """Choose the seats after a round. `live`: running and swapped requests, `most`: the configured seats."""
        if not (live or waiting):
            return
        average, count = self.rows.defective_mean(), self.gaps.count
        late = self.gaps.total() / min(count, MAX_GAPS) if count >= MIN_GAPS else 0.0
        if not average or not late:
            self.seats = LEAST_SEATS
            self.low = self.up = average
        self.is_odd = not self.is_odd
        if self.is_odd:
            if live and late > target + 5:
                self.seats, self.prefill_seats = live, 0
            return
        if late > target + 5:
            up, low = max(average, self.low + 3), max((self.low - 2) % UNSIGNED, LEAST_SEATS)
        elif late < target - 5:
            low, up = min(average, (self.up - 3) % UNSIGNED), min(self.up + 2, most)
        else:
            up, low = min(average + 3, most), max((average - 2) % UNSIGNED, LEAST_SEATS)
        self.low, self.up = min(max(low, LEAST_SEATS), most), min(max(up, LEAST_SEATS), most)
        seats = min(max((self.up + self.low) // 2, self.seats - 2), self.seats + 2)
        self.seats = min(max(seats, live), most)
        self.prefill_seats = max(self.seats - live, 0)


class Batch:
    """What a round runs, until its result comes."""

    __slots__ = ("others", "rows", "time")

    def __init__(self, time: int, rows: Sequence[Request], others: Optional[int]) -> None:
        self.time = time  # of the decision
        self.rows = rows
        self.others = others  # further rows, if all requests decode: see Feedback; None: not all

    def values(self) -> tuple[Any, ...]:
        return self.time, list(self.rows), self.others

    @property
    def size(self) -> int:
        """The number of all rows."""
        return len(self.rows) + (self.others or 0)


class Feedback:
    """Rounds without a result, and what the engine has learned from results."""

    __slots__ = ("dynamic", "fit", "last", "out", "queue", "since")

    def __init__(self, fit: Optional[LatencyFit], dynamic: Optional[DynamicBatch]) -> None:
        self.fit = fit
        self.dynamic = dynamic
        self.out: tuple[Batch, ...] = ()
        # For the dynamic batch size: the time of the newest result of a request. Those that decode and are not in
        # `last` decoded together: `since` is their time. None: `last` has all.
        self.last: dict[Request, int] = {}
        self.since: Optional[int] = None
        # For the latency predictor: tokens of the prompts that wait, and the arrival of the first. None: none waits.
        self.queue: Optional[tuple[int, int]] = None

    def _values(self) -> tuple[Any, ...]:
        return (
            self.fit and self.fit.values(), self.dynamic and self.dynamic.values(), self.last, self.since,
            self.queue, [batch.values() for batch in self.out],
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Feedback) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # nothing needs it

    def received(self, now: int, overlaps: bool) -> Feedback:
        """Return what is known at a decision, as an object that the decision may change.

        If rounds overlap, a result comes when the next round starts to run. Its milliseconds for the latency predictor
        count from the newest round, not from its own.
        """
        dynamic, out = self.dynamic, self.out
        after = Feedback(self.fit, None if dynamic is None else dynamic.copy())
        after.out, after.last, after.since = out, self.last, self.since
        if len(out) >= (2 if overlaps else 1):
            batch, after.out = out[0], out[1:]
            if self.fit is not None:
                after.fit = self.fit.booked(len(out), (now - out[-1].time) // 1000)
            if after.dynamic is not None:
                after._add_gaps(batch, now, after.dynamic)
        return after

    def _add_gaps(self, batch: Batch, now: int, dynamic: DynamicBatch) -> None:
        """Note the times between the results of a batch and the results before them."""
        last, gaps = self.last, dynamic.gaps
        if batch.others:
            assert self.since is not None
            gaps = gaps.added((now - self.since) // 1000, batch.others)
        rows = [row for row in batch.rows if row.finish is None or microseconds(row.finish) >= now]
        for row in rows:
            if row in last:
                gaps = gaps.added((now - last[row]) // 1000, 1)
        dynamic.gaps = gaps
        is_all = batch.others is not None
        if last:
            left = [row for row in last if row.status != "done" and not (is_all and row.decodes)]
            self.last = {row: last[row] for row in left}
        if is_all:
            self.since = now
        else:
            self.last = {**self.last, **{row: now for row in rows if row.status != "done"}}

    def name_all(self, view: View) -> None:
        """Put all requests into `last`: not all of them will decode."""
        if self.since is not None:
            self.last = {**{row: self.since for row in view.running if row.decodes}, **self.last}
            self.since = None

    def look_at_queue(self, view: View, seats: int) -> None:
        """Note the prompts that wait, as many as there are seats."""
        if self.fit is not None and view.waiting:
            tokens = sum([request.length for request in islice(view.waiting, seats)])
            self.queue = tokens, microseconds(view.waiting[0].arrival)

    def joined(self, running: Queue) -> Optional[list[Request]]:
        """Return the requests of `last` that decode; None if they are not the newest ones in running."""
        count = sum([row.decodes for row in self.last])
        joined: list[Request] = []
        for row in reversed(running) if count else ():
            if len(joined) == count:
                break
            if row.decodes:
                if row not in self.last:
                    return None
                joined.append(row)
        joined.reverse()
        return joined

    def decided(self, batch: Batch, statistics: Statistics, is_empty: bool) -> None:
        """Note a decision."""
        if self.fit is not None:
            self.fit = self.fit.decided(len(self.out) + 1, is_empty, statistics)
        if not is_empty:
            self.out = (*self.out, batch)


def laxity(target: int, left: float) -> float:
    """Return which part of a target time is left."""
    return single(single(left) / target) if target else 0.0
