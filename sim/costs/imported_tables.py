"""Cost models from tables that other tools measured: the times of single layers, and Vidur's tables.

A layer profile has times on a grid. All layers but attention depend on the tokens of a step, or on its sequences. The
attention table has four dimensions: tokens of the prefill chunk, tokens cached before it, decoding rows, and their mean
context. It is kept as a table, so a step on a grid point takes exactly the measured time. Between grid points, times
are interpolated linearly, one dimension after the other. The points of one dimension may differ between the points of
the dimension before it.

Vidur's tables are in milliseconds per layer; tokens and context are rounded up, not interpolated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from servesim.core import BadInput, Shape, StepCost
from servesim.core.limits import MAX_COST, MAX_NUMBER
from servesim.files.read import quote

from .mapping import check_number
from .parts import Points, interpolate

MAX_LAYERS = 10_000
MAX_MICROSECONDS = MAX_COST * 1e6
DIMENSIONS = 4  # of the attention table: chunk, cached tokens before it, decoding rows, context
VIDUR_TABLES = ("comp_ms_per_layer", "kvsave_ms_per_layer", "attn_decode_ms_per_layer", "attn_prefill_ms_per_layer")
MAX_MILLISECONDS = MAX_COST * 1e3
TOKEN_STEP, CONTEXT_STEP = 8, 64  # Vidur rounds tokens and context up to multiples of these


class Grid:
    """A table over one dimension. Each point has a value, or a table over the next dimension."""

    def __init__(self, points: Sequence[float], values: Sequence[float], tables: Sequence[Grid] = ()) -> None:
        self.points = [float(point) for point in points]  # increasing
        self.values = [float(value) for value in values]  # of the last dimension, else empty
        self.tables = list(tables)  # of all other dimensions, else empty

    def look_up(self, at: tuple[float, ...], dimension: int = 0) -> float:
        """Interpolate. Below the first point, its value counts. After the last one, the slope between the last two."""
        points = self.points
        last = len(points) - 1
        right = bisect_right(points, at[dimension])
        if not last or not right:
            return self._value(0, at, dimension)
        right = min(right, last)
        weight = (at[dimension] - points[right - 1]) / (points[right] - points[right - 1])
        if weight == 1.0:
            return self._value(right, at, dimension)
        low = self._value(right - 1, at, dimension)
        if not weight:
            return low
        high = self._value(right, at, dimension)
        if weight > 1.0 and high < low:
            return high  # more work than measured never takes less time
        return low + (high - low) * weight

    def _value(self, index: int, at: tuple[float, ...], dimension: int) -> float:
        return self.tables[index].look_up(at, dimension + 1) if self.tables else self.values[index]


def build_grid(rows: Sequence[Sequence[float]]) -> Grid:
    """Return the table of sorted rows; the last number of a row is the value, the others are its point."""
    if len(rows[0]) == 2:
        return Grid([row[0] for row in rows], [row[1] for row in rows])
    groups: dict[float, list[Sequence[float]]] = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row[1:])
    return Grid(list(groups), [], [build_grid(group) for group in groups.values()])


class LayerCost(StepCost):
    """Seconds of a step: a base, the layers without attention by tokens, the head by sequences, and attention."""

    def __init__(
        self, tokens: Points, sequences: Points, attention: Sequence[Sequence[float]], layers: int, base: float = 0.0
    ) -> None:
        self.tokens = tokens  # (tokens of the step, seconds of all layers without attention)
        self.sequences = sequences  # (sequences of the step, seconds of the head and the sampler)
        self.layers = layers
        self.base = base  # host seconds of a step
        rows = sorted(tuple(row) for row in attention)  # (chunk, cached, rows, context, seconds of one layer)
        prompts = [(row[0], row[1], row[4]) for row in rows if not row[2]]
        self.prefills: Optional[Grid] = build_grid(prompts) if prompts else None
        self.decodes = build_grid([row[2:] for row in rows if not row[0]])
        mixed = [row for row in rows if row[0] and row[2]]
        self.mixed = build_grid(mixed) if mixed else None
        if self.mixed is not None:  # a chunk of 0 tokens is a step with decodes only
            self.mixed.points.insert(0, 0.0)
            self.mixed.tables.insert(0, Grid([0.0], [], [self.decodes]))
        self._curves: dict[int, list[tuple[float, float]]] = {}  # by rows: (context of a row, seconds of all layers)
        self._fixed: dict[int, float] = {}  # by padded rows: seconds of a decode step without attention

    def seconds(self, shape: Shape) -> float:
        drafts = shape.drafts  # tokens of the layers and of the head; the KV cache of a row is read once
        if not shape.prefill_rows and not drafts:
            return self.decode(shape.decode_rows, shape.decode_live, shape.context) if shape.decode_rows else 0.0
        seconds = self.base + interpolate(self.tokens, shape.prefill_tokens + shape.decode_rows + drafts)
        seconds += interpolate(self.sequences, shape.prefill_rows + shape.decode_rows + drafts)
        attention = self.attention(*equal_chunk(shape), shape.decode_live, mean_context(shape))
        if not shape.prefill_rows:  # the attention of all tokens of the rows, if it takes longer than reading the cache
            attention = max(attention, self.attention(shape.decode_live + drafts, mean_context(shape), 0.0, 0.0))
        return seconds + self.layers * attention

    def attention(self, chunk: float, cached: float, rows: float, context: float) -> float:
        """Return the seconds of attention in one layer."""
        if not rows:
            return self.prefills.look_up((chunk, cached)) if self.prefills is not None else 0.0
        if not chunk:
            return self.decodes.look_up((rows, context))
        if self.mixed is not None:
            return self.mixed.look_up((chunk, cached, rows, context))
        return self.attention(chunk, cached, 0.0, 0.0) + self.attention(0.0, 0.0, rows, context)

    def decode(self, rows: int, live: int, context: int) -> float:
        fixed = self._fixed.get(rows)
        if fixed is None:
            fixed = self.base + interpolate(self.tokens, rows) + interpolate(self.sequences, rows)
            self._fixed[rows] = fixed
        if not live:
            return fixed
        curve = self._curves.get(live)
        if curve is None:
            curve = self._curves[live] = self._decode_curve(live)
        x = context / live
        right = bisect_right(curve, (x, math.inf))
        if not right:
            return fixed + curve[0][1]
        right = min(right, len(curve) - 1)
        (x0, y0), (x1, y1) = curve[right - 1], curve[right]
        return fixed + (y0 + (y1 - y0) * ((x - x0) / (x1 - x0)))

    def _decode_curve(self, live: int) -> list[tuple[float, float]]:
        """Return attention over context for a number of rows. It is linear between the points of the two next rows."""
        counts = self.decodes.points
        right = min(bisect_right(counts, live), len(counts) - 1)
        points = {point for index in {max(0, right - 1), right} for point in self.decodes.tables[index].points}
        return [(x, self.layers * self.decodes.look_up((live, x))) for x in sorted(points | {2 * max(points) + 1})]


def equal_chunk(shape: Shape) -> tuple[float, float]:
    """Return one chunk, and the tokens cached before it, with the tokens and the attention work of all chunks.

    Several prompts need less attention than one prompt of the same tokens: then the chunk is shorter.
    """
    live = shape.prefill_live
    if not live:
        return 0.0, 0.0
    work = shape.squares / 2 + shape.cross
    cached = work / live - live / 2
    return (live, cached) if cached >= 0 else (math.sqrt(2 * work), 0.0)


def mean_context(shape: Shape) -> float:
    """Return the mean context of the decoding rows."""
    return shape.context / shape.decode_live if shape.decode_live else 0.0


class VidurCost(StepCost):
    """Seconds from Vidur's tables: attention by batch and context or by prompt, all other operations by tokens."""

    def __init__(self, comp: Any, save: Any, decode: Any, prefill: Any, layers: int, base: float = 0.0) -> None:
        self.base = base  # host seconds of a step
        seconds = layers * 1e-3
        self.comp = [value * seconds for value in comp]  # by tokens
        self.save = [value * seconds for value in save]  # by tokens
        self.attend = [[value * seconds for value in row] for row in decode]  # by rows, then by context / 64
        self.prefill = [[value * seconds for value in row] for row in prefill]  # by context / 64, then by tokens

    def seconds(self, shape: Shape) -> float:
        tokens = shape.prefill_tokens + shape.decode_rows + shape.drafts
        if not tokens:
            return 0.0
        seconds = self.base + self._tokens(tokens)
        if shape.decode_rows:
            seconds += self._decode(shape.decode_rows, shape.context)
        if shape.prefill_rows:
            seconds += self._prefill(shape)
        return seconds

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.base + self._tokens(rows) + self._decode(rows, context)

    def _tokens(self, tokens: int) -> float:
        return look_up(self.comp, -(-tokens // TOKEN_STEP) * TOKEN_STEP) + look_up(self.save, tokens)

    def _decode(self, rows: int, context: int) -> float:
        mean = (context + rows) // rows  # Vidur counts the token that is being computed
        last = len(self.attend) - 1
        seconds = look_up(self.attend[min(rows, last)], -(-mean // CONTEXT_STEP))
        return seconds if rows <= last else seconds * rows / last

    def _prefill(self, shape: Shape) -> float:
        context = shape.cross // shape.prefill_live if shape.prefill_live else 0  # a call may have padding rows only
        row = self.prefill[min(-(-context // CONTEXT_STEP), len(self.prefill) - 1)]
        return look_up(row, round(math.sqrt(shape.squares)))


def look_up(table: list[float], index: int) -> float:
    """Return a value of a table; after its end, scale the last value in proportion to the index."""
    last = len(table) - 1
    return table[index] if index <= last else table[last] * index / last


def read_tables(file: Path) -> dict[str, Any]:
    """Return the arrays of an .npz file."""
    import numpy

    if not file.is_file():  # opening a pipe would wait for its writer
        raise BadInput(f"{file}: no such file; expected tables of step costs as .npz")
    try:
        with numpy.load(file) as tables:
            return {name: tables[name] for name in tables.files}
    except Exception as error:  # a damaged archive raises many kinds of errors
        raise BadInput(f"{file}: not an .npz of tables: {' '.join(str(error).split())[:80]}") from None


def layers_and_base(arrays: Mapping[str, Any], base: Any, where: str) -> tuple[int, float]:
    """Return the checked number of layers of the model, and the checked host seconds of a step."""
    layers: Any = arrays["layers"].item() if "layers" in arrays and arrays["layers"].size == 1 else None
    check_number(layers, f"{where}: layers", 1, MAX_LAYERS)
    check_number(base, f"{where}: base")
    return int(layers), float(base)


def load_layers(file: Path, base: Any = 0.0) -> LayerCost:
    """Read the tables that `sim calibrate import layers` wrote to a profile."""
    return layer_cost(read_tables(file), base, str(file))


def layer_cost(arrays: Mapping[str, Any], base: Any, where: str) -> LayerCost:
    """Return the cost model of checked tables."""
    for name, width in (("tokens", 2), ("sequences", 2), ("attention", DIMENSIONS + 1)):
        check_table(arrays.get(name), name, width, where)
    tokens, sequences = ([(row[0], row[1]) for row in scaled(arrays[name])] for name in ("tokens", "sequences"))
    return LayerCost(tokens, sequences, scaled(arrays["attention"]), *layers_and_base(arrays, base, where))


def check_table(table: Any, name: str, width: int, where: str) -> None:
    """Raise BadInput unless an array is a table of points with distinct positions and their microseconds."""
    if table is None or table.dtype.kind not in "fiu" or table.ndim != 2 or table.shape[1] != width or not len(table):
        got = "nothing" if table is None else f"{table.shape} {table.dtype}"
        raise BadInput(f"{where}: {name}: expected a table of {width} columns of numbers, got {got}")
    points, seconds = table[:, :-1], table[:, -1]
    if not ((points >= 0) & (points <= MAX_NUMBER)).all() or not ((seconds >= 0) & (seconds <= MAX_MICROSECONDS)).all():
        raise BadInput(f"{where}: {name}: expected numbers of at least 0, times at most {MAX_MICROSECONDS:g} us")
    if len({tuple(point) for point in points.tolist()}) < len(points):
        raise BadInput(f"{where}: {name}: expected every point once, got one twice")
    if width == 2 and not (points[1:, 0] > points[:-1, 0]).all():
        raise BadInput(f"{where}: {name}: expected increasing points")
    if width > 2 and not ((points[:, 0] == 0) & (points[:, 2] > 0)).any():
        raise BadInput(f"{where}: {name}: expected rows with prefill_chunk 0 and n_decode above 0 (decode steps)")


def scaled(table: Any) -> list[tuple[float, ...]]:
    """Return the rows of a table, with its times in seconds."""
    return [(*row[:-1], row[-1] * 1e-6) for row in table.tolist()]


def load_vidur(file: Path, base: Any = 0.0) -> VidurCost:
    """Read the tables that `sim calibrate import vidur` wrote to a profile."""
    arrays = read_tables(file)
    missing = [name for name in (*VIDUR_TABLES, "layers") if name not in arrays]
    if missing:
        raise BadInput(f"{file}: no table {', '.join(missing)}; found {quote(', '.join(arrays))}")
    for name, width in zip(VIDUR_TABLES, (1, 1, 2, 2)):
        table = arrays[name]
        if table.dtype.kind not in "fiu" or table.ndim != width or min(table.shape) < 2:
            size = f"at least {' x '.join('2' * width)}"
            raise BadInput(f"{file}: {name}: expected a table of numbers, {size}, got {table.shape} {table.dtype}")
        if not ((table >= 0) & (table <= MAX_MILLISECONDS)).all():
            raise BadInput(f"{file}: {name}: expected finite numbers of at least 0, at most {MAX_MILLISECONDS:g} ms")
    comp, save, decode, prefill = (arrays[name].tolist() for name in VIDUR_TABLES)
    return VidurCost(comp, save, decode, prefill, *layers_and_base(arrays, base, str(file)))
