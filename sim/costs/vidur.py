"""Step costs as Vidur keeps them: tables in milliseconds a layer, read off at rounded-up places, never in between."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from servesim.core import BadInput, Shape, StepCost

TABLES = ("comp_ms_per_layer", "kvsave_ms_per_layer", "attn_decode_ms_per_layer", "attn_prefill_ms_per_layer")
TOKENS, CONTEXT = 8, 64  # what Vidur rounds tokens and context up to


class VidurCost(StepCost):
    """Seconds from Vidur's tables: everything but attention by tokens, attention by batch and context or by prompt."""

    def __init__(self, comp: Any, save: Any, decode: Any, prefill: Any, layers: int) -> None:
        seconds = layers * 1e-3
        self.comp = [value * seconds for value in comp]  # by tokens
        self.save = [value * seconds for value in save]  # by tokens
        self.attend = [[value * seconds for value in row] for row in decode]  # by rows, then by context / 64
        self.prefill = [[value * seconds for value in row] for row in prefill]  # by context / 64, then by tokens

    def seconds(self, shape: Shape) -> float:
        tokens = shape.prefill_tokens + shape.decode_rows
        if not tokens:
            return 0.0
        seconds = self._tokens(tokens)
        if shape.decode_rows:
            seconds += self._decode(shape.decode_rows, shape.context)
        if shape.prefill_rows:
            seconds += self._prefill(shape)
        return seconds

    def decode(self, rows: int, live: int, context: int) -> float:
        return self._tokens(rows) + self._decode(rows, context)

    def _tokens(self, tokens: int) -> float:
        return beyond(self.comp, -(-tokens // TOKENS) * TOKENS) + beyond(self.save, tokens)

    def _decode(self, rows: int, context: int) -> float:
        mean = (context + rows) // rows  # Vidur counts the token that is being computed
        last = len(self.attend) - 1
        seconds = beyond(self.attend[min(rows, last)], -(-mean // CONTEXT))
        return seconds if rows <= last else seconds * rows / last

    def _prefill(self, shape: Shape) -> float:
        context = int(shape.cross / shape.prefill_live)
        row = self.prefill[min(-(-context // CONTEXT), len(self.prefill) - 1)]
        return beyond(row, round(math.sqrt(shape.squares)))


def beyond(table: list[float], place: int) -> float:
    """Read a table, and along the line through its last value past its end."""
    last = len(table) - 1
    return table[place] if place <= last else table[last] * place / last


def load_tables(file: Path) -> VidurCost:
    """Read the tables that `sim calibrate import vidur` keeps in a profile."""
    import numpy

    if not file.is_file():
        raise BadInput(f"{file}: no such file; expected Vidur's step costs as .npz")
    try:
        with numpy.load(file) as tables:
            found = {name: tables[name] for name in tables.files}
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: not an .npz of tables: {error}") from None
    missing = [name for name in (*TABLES, "layers") if name not in found]
    if missing:
        raise BadInput(f"{file}: no table {', '.join(missing)}; found {', '.join(found)}")
    for name, width in zip(TABLES, (1, 1, 2, 2)):
        if found[name].ndim != width or not numpy.isfinite(found[name]).all():
            raise BadInput(f"{file}: {name}: expected finite numbers in {width} dimension{'s' * (width > 1)}")
    comp, save, decode, prefill = (found[name].tolist() for name in TABLES)
    return VidurCost(comp, save, decode, prefill, int(found["layers"]))
