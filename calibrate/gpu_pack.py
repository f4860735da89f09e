"""Pack the rows of a step into one array of 32-bit integers: everything the device must be told, in one copy.

Packed order is rows of one token first (their contexts cut into splits), then longer ones (their queries cut into
tiles). The buffer holds
    header | token ids | positions | slots | last token of each row | first split of each row | tiles | splits | tables
Everything before the tiles has a fixed place for a given form, so that a recorded graph finds it again; tiles, splits
and tables are found through the header and through each other. Lengths are tokens.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Optional

import numpy as np

from .backend import OutOfMemory, Row

HEADER = 4  # tiles, where they begin, splits, where they begin
PIECE = 6  # where its table begins, first query, queries, position of the first query, first key, one past the last key


class Form(NamedTuple):
    """What is fixed about a step, and therefore what a graph is recorded for; and where its parts lie."""

    tokens: int  # padded
    rows: int  # padded
    tiles: bool  # whether there are rows of several tokens
    splits: int  # room for this many splits of one-token rows

    @property
    def positions(self) -> int:
        return HEADER + self.tokens

    @property
    def slots(self) -> int:
        return HEADER + 2 * self.tokens

    @property
    def last(self) -> int:
        return HEADER + 3 * self.tokens

    @property
    def first_split(self) -> int:
        return self.last + self.rows

    @property
    def end(self) -> int:
        return self.first_split + self.rows + 1


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
        split: int,
        gears: Sequence[int],
        token_gears: Sequence[int],
    ) -> None:
        self.buffer = buffer
        self.blocks, self.block_size = blocks, block_size
        self.context, self.vocab = context, vocab
        self.tile, self.split = tile, split  # queries in a tile, keys in a split
        self.gears, self.token_gears = sorted(gears), sorted(token_gears)
        self.scratch = blocks * block_size  # the slot padding is written to: in the block behind the pool

    def forms(self) -> list[Form]:
        """Return every form worth a graph, largest first: decodes by rows, prompts and mixed steps by tokens."""
        decodes = [self._of_rows(gear) for gear in self.gears]
        prompts = [self._of_tokens(gear, mixed) for gear in self.token_gears for mixed in (False, True)]
        return sorted(decodes + prompts, reverse=True)

    def form(self, tokens: int, rows: int, singles: int) -> Form:
        """Return the smallest recorded form that holds the step, or the step's own where none does."""
        if singles == rows:
            at = bisect_left(self.gears, rows)
            if at < len(self.gears):
                return self._of_rows(self.gears[at])
        else:
            at = bisect_left(self.token_gears, tokens)
            if at < len(self.token_gears) and rows <= self.gears[-1]:
                return self._of_tokens(self.token_gears[at], singles > 0)
        return Form(tokens, rows, singles < rows, self._splits(singles))

    def blank(self, form: Form) -> int:
        """Fill the buffer with a step of nothing but padding; return how many integers it has."""
        self.buffer[: form.end] = 0
        self.buffer[form.slots : form.last] = self.scratch
        return form.end

    def pack(self, rows: Sequence[Row]) -> Packed:
        """Write the rows into the buffer."""
        lengths = [len(row.tokens) for row in rows]
        singles = lengths.count(1)
        order: Optional[list[int]] = None
        if 0 < singles < len(rows):
            order = sorted(range(len(rows)), key=lambda index: lengths[index] != 1)
            rows = [rows[index] for index in order]
        flat = self._flatten(rows)
        form = self.form(len(flat.ids), len(rows), singles)
        return Packed(form, self._write(form, flat, singles), order)

    def _splits(self, rows: int) -> int:
        return rows * -(-self.context // self.split)

    def _of_rows(self, gear: int) -> Form:
        return Form(gear, gear, False, self._splits(gear))

    def _of_tokens(self, gear: int, mixed: bool) -> Form:
        rows = min(gear, self.gears[-1])
        return Form(gear, rows, True, self._splits(rows) if mixed else 0)

    def _flatten(self, rows: Sequence[Row]) -> Flat:
        tables = [row.table for row in rows]
        tokens = [row.tokens for row in rows]
        lengths = np.fromiter(map(len, tokens), np.int64, len(rows))
        held = np.fromiter(map(len, tables), np.int64, len(rows))
        first = np.fromiter([row.position for row in rows], np.int64, len(rows))
        ids = _join(tokens, int(lengths.sum()))
        flat = Flat(ids, _join(tables, int(held.sum())), lengths, first, held)
        self._check(flat)
        return flat

    def _check(self, flat: Flat) -> None:
        """Refuse what would read or write outside the device's arrays."""
        ends = flat.first + flat.lengths
        if len(ends) == 0 or flat.lengths.min() < 1:
            raise ValueError("step: expected at least one row and at least one token in each")
        if flat.first.min() < 0 or ends.max() > self.context:
            raise ValueError(f"step: positions {flat.first.min()}..{ends.max() - 1} outside 0..{self.context - 1}")
        if flat.ids.min() < 0 or flat.ids.max() >= self.vocab:
            raise ValueError(f"step: token ids {flat.ids.min()}..{flat.ids.max()} outside 0..{self.vocab - 1}")
        short = np.flatnonzero(flat.held * self.block_size < ends)
        if len(short):
            row = short[0]
            raise ValueError(f"step: {flat.held[row]} blocks of {self.block_size} cannot hold {ends[row]} tokens")
        if flat.tables.min() < 0 or flat.tables.max() >= self.blocks:
            raise ValueError(f"step: blocks {flat.tables.min()}..{flat.tables.max()} outside 0..{self.blocks - 1}")

    def _write(self, form: Form, flat: Flat, singles: int) -> int:
        starts = np.cumsum(flat.lengths) - flat.lengths
        table_starts = np.cumsum(flat.held) - flat.held
        ends = flat.first + flat.lengths
        tile_row, tile_from, _ = _cut(flat.lengths[singles:], self.tile)
        split_row, split_from, first_split = _cut(ends[:singles], self.split)
        tiles_at = form.end
        splits_at = tiles_at + PIECE * len(tile_row)
        tables_at = splits_at + PIECE * len(split_row)
        used = tables_at + len(flat.tables)
        if used > len(self.buffer):
            raise OutOfMemory(f"a step of {len(flat.ids)} tokens and {len(flat.tables)} table entries is too large")

        buffer = self.buffer
        self.blank(form)
        buffer[:HEADER] = len(tile_row), tiles_at, len(split_row), splits_at
        self._write_tokens(form, flat, starts, table_starts)
        buffer[form.first_split : form.end] = len(split_row)
        buffer[form.first_split : form.first_split + singles] = first_split
        buffer[tables_at:used] = flat.tables

        pieces = buffer[tiles_at:splits_at].reshape(-1, PIECE)
        tile_row += singles
        queries = np.minimum(flat.lengths[tile_row] - tile_from, self.tile)
        position = flat.first[tile_row] + tile_from
        # The longest first: programs take pieces in turn, and a long one begun late would be waited for.
        longest = np.argsort(-(position + queries), kind="stable")
        columns = (tables_at + table_starts[tile_row], starts[tile_row] + tile_from, queries, position)
        for column, values in enumerate((*columns, np.zeros_like(queries), position + queries)):
            pieces[:, column] = values[longest]

        pieces = buffer[splits_at:tables_at].reshape(-1, PIECE)
        end = ends[split_row]
        columns = (tables_at + table_starts[split_row], split_row, np.ones_like(split_row), end - 1)
        for column, values in enumerate((*columns, split_from, np.minimum(split_from + self.split, end))):
            pieces[:, column] = values
        return used

    def _write_tokens(self, form: Form, flat: Flat, starts: Any, table_starts: Any) -> None:
        buffer, live = self.buffer, len(flat.ids)
        positions = np.repeat(flat.first - starts, flat.lengths) + np.arange(live)
        block = flat.tables[np.repeat(table_starts, flat.lengths) + positions // self.block_size]
        buffer[HEADER : HEADER + live] = flat.ids
        buffer[form.positions : form.positions + live] = positions
        buffer[form.slots : form.slots + live] = block * self.block_size + positions % self.block_size
        buffer[form.last : form.last + len(starts)] = starts + flat.lengths - 1


def _join(parts: Sequence[Any], total: int) -> Any:
    """Return sequences of integers as one array; array("i") and int32 parts are forty times as fast as lists."""
    try:
        joined = b"".join(parts)
        if len(joined) == 4 * total:
            return np.frombuffer(joined, np.int32)
    except (TypeError, BufferError):
        pass
    return np.frombuffer(struct.pack(f"{total}i", *chain.from_iterable(parts)), np.int32)


def _cut(lengths: Any, size: int) -> tuple[Any, Any, Any]:
    """Cut lengths into pieces of a size: return each piece's owner and beginning, and each owner's first piece."""
    pieces = -(-lengths // size)
    first = np.cumsum(pieces) - pieces
    owner = np.repeat(np.arange(len(lengths)), pieces)
    return owner, (np.arange(len(owner)) - first[owner]) * size, first
