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
PIECE = (
    7  # where its table begins, first query, queries, position of the first, first key, one past the last, its place
)
UNIT = 64  # keys the device takes at a time: splits are multiples of it


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
        if flat.lengths.min() < 1:
            raise ValueError("step: expected at least one token in each row")
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
        starts = flat.lengths.cumsum() - flat.lengths
        tiles = _cut(flat.lengths[singles:], self.tile, 1)
        splits = _cut(flat.first[:singles] + 1, UNIT, -(-self.split // UNIT))
        tiles_at = form.end
        splits_at = tiles_at + PIECE * len(tiles.owner)
        tables_at = splits_at + PIECE * len(splits.owner)
        used = tables_at + len(flat.tables)
        if used > len(self.buffer):
            raise OutOfMemory(f"a step of {len(flat.ids)} tokens and {len(flat.tables)} table entries is too large")

        buffer = self.buffer
        self.blank(form)
        buffer[:HEADER] = len(tiles.owner), tiles_at, len(splits.owner), splits_at
        table_at = tables_at + flat.held.cumsum() - flat.held
        buffer[tables_at:used] = flat.tables
        self._write_tokens(form, flat, starts, table_at)
        if len(tiles.owner):
            row = tiles.owner + singles
            begin, size = flat.first[row] + tiles.begin, np.minimum(tiles.size, flat.lengths[row] - tiles.begin)
            self._write_pieces(
                tiles_at, begin + size, (table_at[row], starts[row] + tiles.begin, size, begin, 0, begin + size, 0)
            )
        if singles:
            row, end = splits.owner, flat.first[splits.owner] + 1
            until = np.minimum(splits.begin + splits.size, end)
            self._write_pieces(
                splits_at,
                until - splits.begin,
                (table_at[row], row, 1, end - 1, splits.begin, until, np.arange(len(row))),
            )
            buffer[form.first_split : form.end] = len(row)
            buffer[form.first_split : form.first_split + singles] = splits.first
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
        buffer[form.last : form.last + len(starts)] = starts + flat.lengths - 1

    def _write_pieces(self, at: int, keys: Any, columns: Sequence[Any]) -> None:
        """Write the pieces, those with most keys first: programs take them in turn, and so end at the same time."""
        pieces = np.empty((len(keys), PIECE), np.int32)
        for column, values in enumerate(columns):
            pieces[:, column] = values
        longest = np.argsort(-keys, kind="stable")
        self.buffer[at : at + pieces.size] = pieces[longest].ravel()


class Cut(NamedTuple):
    """Lengths cut into pieces."""

    owner: Any  # the length each piece is of
    begin: Any
    size: Any  # the last one of an owner may reach beyond its end
    first: Any  # each owner's first piece


UNCUT = Cut(*np.zeros((4, 0), np.int64))


def _cut(lengths: Any, unit: int, most: int) -> Cut:
    """Cut each length into as few pieces of at most so many units as it takes, as even as units allow."""
    if not len(lengths):
        return UNCUT
    units = -(-lengths // unit)
    pieces = -(-units // most)
    first = pieces.cumsum() - pieces
    owner = np.repeat(np.arange(len(lengths)), pieces)
    index = np.arange(len(owner)) - first[owner]
    base, extra = np.divmod(units[owner], pieces[owner])
    return Cut(owner, unit * (index * base + np.minimum(index, extra)), unit * (base + (index < extra)), first)


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
