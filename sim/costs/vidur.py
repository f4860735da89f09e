"""Vidur's step costs: tables in milliseconds per layer, with tokens and context rounded up, not interpolated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from servesim.core import BadInput, Shape, StepCost
from servesim.core.limits import MAX_COST, is_number
from servesim.files.read import quote

TABLES = ("comp_ms_per_layer", "kvsave_ms_per_layer", "attn_decode_ms_per_layer", "attn_prefill_ms_per_layer")
MAX_LAYERS = 10_000
MAX_MILLISECONDS = MAX_COST * 1e3
TOKEN_STEP, CONTEXT_STEP = 8, 64  # Vidur rounds tokens and context up to multiples of these


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
        tokens = shape.prefill_tokens + shape.decode_rows
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
        context = int(shape.cross / shape.prefill_live)
        row = self.prefill[min(-(-context // CONTEXT_STEP), len(self.prefill) - 1)]
        return look_up(row, round(math.sqrt(shape.squares)))


def look_up(table: list[float], index: int) -> float:
    """Return a value of a table; after its end, scale the last value in proportion to the index."""
    last = len(table) - 1
    return table[index] if index <= last else table[last] * index / last


def load_tables(file: Path, base: Any = 0.0) -> VidurCost:
    """Read the tables that `sim calibrate import vidur` wrote to a profile."""
    import numpy

    if not file.is_file():  # opening a pipe would wait for its writer
        raise BadInput(f"{file}: no such file; expected Vidur's step costs as .npz")
    try:
        with numpy.load(file) as tables:
            arrays = {name: tables[name] for name in tables.files}
    except Exception as error:  # a damaged archive raises many kinds of errors
        raise BadInput(f"{file}: not an .npz of tables: {' '.join(str(error).split())[:80]}") from None
    missing = [name for name in (*TABLES, "layers") if name not in arrays]
    if missing:
        raise BadInput(f"{file}: no table {', '.join(missing)}; found {quote(', '.join(arrays))}")
    for name, width in zip(TABLES, (1, 1, 2, 2)):
        table = arrays[name]
        if table.dtype.kind not in "fiu" or table.ndim != width or min(table.shape) < 2:
            size = f"at least {' x '.join('2' * width)}"
            raise BadInput(f"{file}: {name}: expected a table of numbers, {size}, got {table.shape} {table.dtype}")
        if not ((table >= 0) & (table <= MAX_MILLISECONDS)).all():
            raise BadInput(f"{file}: {name}: expected finite numbers of at least 0, at most {MAX_MILLISECONDS:g} ms")
    layers: Any = arrays["layers"].item() if arrays["layers"].size == 1 else None
    if not is_number(layers, 1, MAX_LAYERS):
        raise BadInput(f"{file}: layers: expected a number from 1 to {MAX_LAYERS}, got {quote(layers)}")
    if not is_number(base, 0.0, MAX_COST):
        raise BadInput(f"{file}: base: expected a number of seconds from 0 to {MAX_COST:g}, got {quote(base)}")
    comp, save, decode, prefill = (arrays[name].tolist() for name in TABLES)
    return VidurCost(comp, save, decode, prefill, int(layers), float(base))
