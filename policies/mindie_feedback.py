"""What MindIE-LLM learns from the results of its batches: the latency predictor and the dynamic batch size.

The objects are parts of the policy state. A change returns a new object; lists only grow behind what older ones use.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, Optional

from servesim.core import Request, View

REFIT: Final = 400  # decodes after which the decode fit is solved again
MAX_POINTS: Final = 1000  # decodes that it uses
MAX_GAPS: Final = 20000  # newest gaps and rows that count for the dynamic batch size
MIN_GAPS: Final = 2000  # gaps below which the mean is taken for 0
LEAST_SEATS: Final = 3
UNSIGNED: Final = 1 << 64  # a subtraction below 0 wraps around


def microseconds(seconds: float) -> int:
    """Return a time in whole microseconds, as the engine's clock gives it."""
    return int(seconds * 1e6 + 0.5)


def single(number: float) -> float:
    """Round a number to single precision."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


class Recent:
    """The newest values of a series, and their sum."""

    __slots__ = ("_end", "_limit", "_values", "count", "total")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: list[int] = []
        self._end = 0  # values of the list that count; those behind are of a later state
        self.count = 0  # of all values so far
        self.total = 0  # sum of the newest `limit` values

    def added(self, values: Sequence[int]) -> Recent:
        """Return the series with more values."""
        after = Recent(self._limit)
        if len(self._values) == self._end < 2 * self._limit:
            after._values = self._values
        else:
            after._values = self._values[max(0, self._end - self._limit) : self._end]
        before = len(after._values)
        after._values.extend(values)
        after._end = len(after._values)
        after.count = self.count + len(values)
        after.total = self.total + sum(values)
        first = max(0, after._end - self._limit)
        if first:
            after.total -= sum(after._values[max(0, before - self._limit) : first])
        return after

    def weighted_mean(self) -> int:
        """Return the mean of the newest values, each with itself as its weight, up to a sum of `limit`.

        The value that crosses the limit has what is above the limit as its weight: a defect of the engine.
        """
        weight = total = 0
        for index in range(self._end - 1, max(0, self._end - self._limit) - 1, -1):
            value = self._values[index]
            above = weight + value - self._limit
            if above > 0:
                return (total + value * above) // (weight + above)
            weight += value
            total += value * value
        return total // weight if weight else 0


class LatencyFit:
    """The latency predictor. Its defect: a busy round reuses the statistics of the first round with its number."""

    __slots__ = ("counts", "decode", "intercept", "points", "slope", "statistics", "sums")

    def __init__(self) -> None:
        self.slope, self.intercept = 0.1317, 25.797  # ms per prompt token, ms
        self.decode = (0.2181, 0.0, 29.961)  # ms per sequence, ms per block, ms
        self.counts = (0, 0, 0)  # points of the prefill fit, of the decode fit, and those that `points` has
        self.sums = (0, 0, 0, 0)  # of x, y, x * x and x * y of the prefill fit
        self.points: list[tuple[int, int, int]] = []  # sequences, blocks, ms
        # of the numbers that may still be booked: prefill, tokens, sequences, blocks
        self.statistics: tuple[tuple[bool, int, int, int], ...] = ()

    def values(self) -> tuple[Any, ...]:
        return self.slope, self.intercept, self.decode, self.counts, self.sums, self.statistics

    def copy(self) -> LatencyFit:
        after = LatencyFit()
        after.slope, after.intercept, after.decode, after.counts, after.sums, after.statistics = self.values()
        after.points = self.points
        return after

    def decided(self, number: int, is_empty: bool, statistics: tuple[bool, int, int, int]) -> LatencyFit:
        """Note a round, the `number`-th without a result. An empty one never gets a result: it raises all numbers."""
        after, stored = self.copy(), self.statistics
        if len(stored) < number:
            stored = (*stored, statistics)
        after.statistics = stored[1:] if is_empty else stored
        return after

    def booked(self, number: int, ms: int) -> LatencyFit:
        """Note a result of the newest round."""
        after = self.copy()
        is_prefill, tokens, rows, blocks = self.statistics[number - 1]
        if is_prefill:
            after._add_prefill(tokens, ms)
        else:
            after._add_decode((rows, blocks, ms))
        return after

    def _add_prefill(self, x: int, y: int) -> None:
        """Least squares. A point is kept if slope and intercept stay above 0; one with the only x is just counted."""
        n = self.counts[0] + 1
        sx, sy, sxx, sxy = self.sums[0] + x, self.sums[1] + y, self.sums[2] + x * x, self.sums[3] + x * y
        divisor = n * sxx - sx * sx
        if n > 1 and not divisor:
            self.counts = (n, *self.counts[1:])
            return
        if n > 1:
            slope = (n * sxy - sx * sy) / divisor
            intercept = (sy - slope * sx) / n
            if slope <= 0 or intercept <= 0:
                if n == 2:
                    self.counts, self.sums = (0, *self.counts[1:]), (0, 0, 0, 0)
                return
            self.slope, self.intercept = slope, intercept
        self.counts, self.sums = (n, *self.counts[1:]), (sx, sy, sxx, sxy)

    def _add_decode(self, point: tuple[int, int, int]) -> None:
        prefills, decodes, used = self.counts
        points = self.points if len(self.points) == used else self.points[:used]
        points.append(point)
        if not (decodes + 1) % REFIT:
            points = points[-MAX_POINTS:]
            self._fit_decode(points)
        self.points, self.counts = points, (prefills, decodes + 1, len(points))

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

    def __init__(self, seats: int, prefill_seats: int) -> None:
        self.seats = seats
        self.prefill_seats = prefill_seats
        self.low, self.up = LEAST_SEATS, seats  # bounds of the search
        self.is_odd = False  # whether the last update was odd
        self.rows = Recent(MAX_GAPS)  # sequences of decode rounds
        self.gaps = Recent(MAX_GAPS)  # ms between two tokens of a request

    def values(self) -> tuple[Any, ...]:
        return (
            self.seats, self.prefill_seats, self.low, self.up, self.is_odd, self.rows.count, self.rows.total,
            self.gaps.count, self.gaps.total,
        )  # fmt: skip

    def copy(self) -> DynamicBatch:
        after = DynamicBatch(self.seats, self.prefill_seats)
        after.low, after.up, after.is_odd, after.rows, after.gaps = (
            self.low, self.up, self.is_odd, self.rows, self.gaps
        )  # fmt: skip
        return after

    def update(self, most: int, target: int, live: int, waiting: int) -> None:
        """Choose the seats after a round. `live`: running and swapped requests, `most`: the configured seats."""
        if not (live or waiting):
            return
        average, count = self.rows.weighted_mean(), self.gaps.count
        late = self.gaps.total / min(count, MAX_GAPS) if count >= MIN_GAPS else 0.0
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


class Feedback:
    """Rounds without a result, and what the engine has learned from results."""

    __slots__ = ("dynamic", "fit", "last", "out")

    def __init__(self, fit: Optional[LatencyFit], dynamic: Optional[DynamicBatch]) -> None:
        self.fit = fit
        self.dynamic = dynamic
        self.out: tuple[tuple[int, Sequence[Request]], ...] = ()  # time of the decision, and its rows
        self.last: dict[Request, int] = {}  # time of the newest result, for the dynamic batch size

    def _values(self) -> tuple[Any, ...]:
        return (
            self.fit and self.fit.values(), self.dynamic and self.dynamic.values(), self.last,
            [(time, list(rows)) for time, rows in self.out],
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Feedback) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # nothing needs it

    def received(self, now: int, overlaps: bool) -> Feedback:
        """Return what is known at a decision. If rounds overlap, a result comes when the next round starts to run."""
        out = self.out
        if len(out) < (2 if overlaps else 1):
            return self
        (time, rows), fit, dynamic = out[0], self.fit, self.dynamic
        if fit is not None:
            fit = fit.booked(len(out), (now - time) // 1000)
        after = Feedback(fit, dynamic)
        after.out = out[1:]
        if dynamic is not None:
            after.dynamic = dynamic = dynamic.copy()
            rows = [row for row in rows if row.finish is None or microseconds(row.finish) >= now]
            last = self.last
            dynamic.gaps = dynamic.gaps.added([(now - last[row]) // 1000 for row in rows if row in last])
            after.last = {row: time for row, time in last.items() if row.status != "done"}
            after.last.update({row: now for row in rows if row.status != "done"})
        return after

    def decided(
        self, now: int, kind: str, rows: Sequence[Request], tokens: int, blocks: int, is_empty: bool
    ) -> Feedback:
        """Return what is known after a decision."""
        after = Feedback(self.fit, self.dynamic)
        after.last, after.out = self.last, self.out if is_empty else (*self.out, (now, rows))
        if self.fit is not None:
            is_prefill = kind == "P" and not is_empty
            statistics = (is_prefill, tokens, 0 if is_prefill else len(rows), blocks)
            after.fit = self.fit.decided(len(self.out) + 1, is_empty, statistics)
        return after


def laxity(target: int, left: float) -> float:
    """Return which part of a target time is left."""
    return single(single(left) / target) if target else 0.0


def prefers_prefill(fit: LatencyFit, view: View, seats: int, now: int, prefill_target: int, decode_target: int) -> bool:
    """Whether less of the target time of prefills is left than of that of decodes."""
    tokens = rows = blocks = 0
    for index, request in enumerate(view.waiting):
        if index == seats:
            break
        tokens += request.length
    for index, request in enumerate(view.running):
        if index == seats:
            break
        rows += 1
        blocks += request.blocks
    for index, request in enumerate(view.swapped):
        if index == seats:
            break
        rows += 1
        blocks += view.pool.blocks_for(request.length)
    prefill = single(single(single(fit.slope) * tokens) + single(fit.intercept))
    a, b, c = fit.decode
    wait = (now - microseconds(view.waiting[0].arrival)) // 1000
    return laxity(prefill_target, prefill_target - wait - prefill) < laxity(
        decode_target, decode_target - single(a * rows + b * blocks + c)
    )
