"""Pack the rows of a step into one array of 32-bit integers: everything the device must know, in one copy.

Packed order is rows of one token first, then longer ones, whose queries are cut into tiles. The buffer holds
    header | token ids | positions | slots | last token of each row | where each row's table begins | tiles | tables
Everything before the tables has a fixed place for a given form, so that a recorded graph finds it again. Lengths are
tokens. This runs before every step with the device idle, hence few and small array operations.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.calibrate.device.backend import OutOfMemory, Row

HEADER = 4  # tiles, rows of one token, two to spare
PIECE = 7  # table, first query, queries, position of the first, first key, one past the last, place


class Form(NamedTuple):
    """What is fixed about a step, and therefore what a graph is recorded for; and where its parts lie."""

    tokens: int  # padded
    rows: int  # padded
    tiles: bool  # whether there are rows of several tokens
    singles: bool  # whether there are rows of one token

    @property
    def positions(self) -> int:
        return HEADER + aligned(self.tokens)

    @property
    def slots(self) -> int:
        return HEADER + 2 * aligned(self.tokens)

    @property
    def last(self) -> int:
        return HEADER + 3 * aligned(self.tokens)

    @property
    def tables(self) -> int:
        return self.last + aligned(self.rows)

    @property
    def end(self) -> int:
        return self.tables + aligned(self.rows)


def aligned(integers: int) -> int:
    """Round up to 16 bytes: kernels are compiled for aligned arrays, and again for others."""
    return -(-integers // 4) * 4


class Packed(NamedTuple):
    """A step as it lies in the buffer."""

    form: Form
    used: int  # integers to copy
    order: Optional[list[int]]  # packed row i is the caller's row order[i]; None when the two agree


class Flat(NamedTuple):
    """The rows of a step as arrays."""

    ids: Any  # token ids of all rows, one after the other
    tables: Any  # tables of all rows, likewise
    lengths: Any  # tokens of each row
    first: Any  # position of each row's first token
    held: Any  # blocks of each row


class Packer:
    """Fills the buffer; knows the gears, so that a step takes one of few forms where it can."""

    def __init__(
        self,
        buffer: Any,
        blocks: int,
        block_size: int,
        context: int,
        vocab: int,
        tile: int,
        gears: Sequence[int],
        token_gears: Sequence[int],
    ) -> None:
        self.buffer = buffer
        self.blocks, self.block_size = blocks, block_size
        self.context, self.vocab = context, vocab
        self.tile = tile  # queries in a tile
        self.gears, self.token_gears = sorted(gears), sorted(token_gears)
        self.scratch = blocks * block_size  # the slot padding is written to: in the block behind the pool

    def forms(self) -> list[Form]:
        """Return every form worth a graph, largest first: decodes by rows, prompts and mixed steps by tokens."""
        decodes = [Form(gear, gear, False, True) for gear in self.gears]
        prompts = [self._of_tokens(gear, mixed) for gear in self.token_gears for mixed in (False, True)]
        return sorted(decodes + prompts, reverse=True)

    def form(self, tokens: int, rows: int, singles: int) -> Form:
        """Return the smallest recorded form that holds the step, or the step's own where none does."""
        if singles == rows:
            at = bisect_left(self.gears, rows)
            if at < len(self.gears):
                return Form(self.gears[at], self.gears[at], False, True)
        else:
            at = bisect_left(self.token_gears, tokens)
            if at < len(self.token_gears) and rows <= self.gears[-1]:
                return self._of_tokens(self.token_gears[at], singles > 0)
        return Form(tokens, rows, singles < rows, singles > 0)

    def blank(self, form: Form) -> int:
        """Fill the buffer with a step of nothing but padding; return how many integers it has."""
        self.buffer[: form.end] = 0
        self.buffer[form.slots : form.last] = self.scratch
        return form.end

    def pack(self, rows: Sequence[Row]) -> Packed:
        """Write the rows into the buffer."""
        lengths = [len(row.tokens) for row in rows]
        if 0 in lengths:
            raise ValueError("step: expected at least one token in each row")
        singles = lengths.count(1)
        order: Optional[list[int]] = None
        if 0 < singles < len(rows):
            order = sorted(range(len(rows)), key=lambda index: lengths[index] != 1)
            rows = [rows[index] for index in order]
        flat = self._flatten(rows)
        form = self.form(len(flat.ids), len(rows), singles)
        return Packed(form, self._write(form, flat, singles), order)

    def _of_tokens(self, gear: int, mixed: bool) -> Form:
        return Form(gear, min(gear, self.gears[-1]), True, mixed)

    def _flatten(self, rows: Sequence[Row]) -> Flat:
        if not rows:
            raise ValueError("step: expected at least one row")
        tokens, first, tables = zip(*rows)
        lengths, held = np.array([*map(len, tokens)]), np.array([*map(len, tables)])
        ids, blocks = _join(tokens, int(lengths.sum())), _join(tables, int(held.sum()))
        flat = Flat(ids, blocks, lengths, np.array(first), held)
        self._check(flat)
        return flat

    def _check(self, flat: Flat) -> None:
        """Refuse what would read or write outside the device's arrays."""
        ids, tables, ends = flat.ids, flat.tables, flat.first + flat.lengths
        if flat.first.min() < 0 or ends.max() > self.context:
            raise ValueError(f"step: positions {flat.first.min()}..{ends.max() - 1} outside 0..{self.context - 1}")
        if (flat.held * self.block_size < ends).any():
            row = np.flatnonzero(flat.held * self.block_size < ends)[0]
            raise ValueError(f"step: {flat.held[row]} blocks of {self.block_size} cannot hold {ends[row]} tokens")
        # Read as unsigned, a negative number is too large.
        if ids.view(np.uint32).max() >= self.vocab:
            raise ValueError(f"step: token ids {ids.min()}..{ids.max()} outside 0..{self.vocab - 1}")
        if tables.view(np.uint32).max() >= self.blocks:
            raise ValueError(f"step: blocks {tables.min()}..{tables.max()} outside 0..{self.blocks - 1}")

    def _write(self, form: Form, flat: Flat, singles: int) -> int:
        tiles = self._tiles(flat, singles) if form.tiles else None
        tables_at = form.end + (tiles.size if tiles is not None else 0)
        used = tables_at + len(flat.tables)
        if used > len(self.buffer):
            raise OutOfMemory(f"a step of {len(flat.ids)} tokens and {len(flat.tables)} table entries is too large")
        buffer, rows = self.buffer, len(flat.lengths)
        self.blank(form)
        table_at = flat.held.cumsum()
        table_at += tables_at - flat.held
        buffer[tables_at:used] = flat.tables
        buffer[form.tables : form.tables + rows] = table_at
        buffer[1] = singles
        last = flat.lengths.cumsum() - 1
        buffer[form.last : form.last + rows] = last
        self._write_tokens(form, flat, last - flat.lengths + 1, table_at)
        if tiles is not None:
            buffer[0] = len(tiles)
            tiles[:, 0] = table_at[tiles[:, 0]]
            buffer[form.end : tables_at] = tiles.ravel()
        return used

    def _write_tokens(self, form: Form, flat: Flat, starts: Any, table_at: Any) -> None:
        buffer, live, position = self.buffer, len(flat.ids), flat.first
        if live > len(starts):
            position = np.repeat(flat.first - starts, flat.lengths) + np.arange(live)
            table_at = np.repeat(table_at, flat.lengths)
        block, offset = np.divmod(position, self.block_size)
        buffer[HEADER : HEADER + live] = flat.ids
        buffer[form.positions : form.positions + live] = position
        buffer[form.slots : form.slots + live] = buffer[table_at + block] * self.block_size + offset

    def _tiles(self, flat: Flat, singles: int) -> Any:
        """Return the tiles of the longer rows, with the row in place of its table.

        Those with most keys come first: programs take them in turn, and a long one begun late would be waited for.
        """
        lengths = flat.lengths[singles:]
        count = -(-lengths // self.tile)
        row = np.repeat(np.arange(len(lengths)), count)
        begin = (np.arange(len(row)) - (count.cumsum() - count)[row]) * self.tile
        size = np.minimum(lengths[row] - begin, self.tile)
        row += singles
        starts = flat.lengths.cumsum() - flat.lengths
        tiles = np.zeros((len(row), PIECE), np.int32)
        tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = row, starts[row] + begin, size, flat.first[row] + begin
        tiles[:, 5] = tiles[:, 2] + tiles[:, 3]
        return tiles[np.argsort(-tiles[:, 5], kind="stable")]


def _join(parts: Sequence[Any], total: int) -> Any:
    """Return sequences of integers as one array; array("i") and int32 parts are forty times as fast as lists."""
    try:
        joined = b"".join(parts)
        if len(joined) == 4 * total:
            return np.frombuffer(joined, np.int32)
    except (TypeError, BufferError):
        pass
    try:
        return np.frombuffer(struct.pack(f"{total}i", *chain.from_iterable(parts)), np.int32)
    except struct.error as error:
        raise ValueError(f"step: tokens and tables are 32-bit integers: {error}") from None
