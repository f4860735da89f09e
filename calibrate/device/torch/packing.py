"""Pack the rows of a step into one array of 32-bit integers, so that one copy brings them to the device.

Rows of one token come first, then longer rows, whose queries are cut into tiles. Lengths are tokens. The buffer holds
    header | token ids | positions | slots | last token of each row | offset of each row's table | tiles | tables
A row with drafts has its last tokens there: the last one that is known, and the drafts.
If tokens of the step before are not known yet, their places follow: in this buffer, then in the results of that step.
For a given graph shape, all sections before the tables have fixed offsets, as a recorded graph needs. The device is
idle while this code runs before every step, so it uses few and small array operations.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.calibrate.device.backend import OutOfMemory, Row

HEADER = 4  # integers: number of tiles, number of one-token rows, two unused
PIECE_INTEGERS = 7  # integers: table, first query, queries, position of the first query, first key, end of keys, index


class GraphShape(NamedTuple):
    """The padded size of a step, for which one graph is recorded. The properties are offsets into the buffer."""

    tokens: int  # padded
    rows: int  # padded
    tiles: bool  # whether it has rows of several tokens
    singles: bool  # whether it has rows of one token

    @property
    def positions(self) -> int:
        return HEADER + align(self.tokens)

    @property
    def slots(self) -> int:
        return HEADER + 2 * align(self.tokens)

    @property
    def last(self) -> int:
        return HEADER + 3 * align(self.tokens)

    @property
    def tables(self) -> int:
        return self.last + align(self.rows)

    @property
    def end(self) -> int:
        return self.tables + align(self.rows)


def align(integers: int) -> int:
    """Round up to a multiple of 16 bytes. Triton compiles kernels a second time for unaligned arrays."""
    return -(-integers // 4) * 4


class PackedStep(NamedTuple):
    """A step in the buffer."""

    shape: GraphShape
    used: int  # integers to copy
    order: Optional[list[int]]  # packed output i is the caller's output order[i]; None if the orders are equal
    outputs: int  # next tokens: one of each row, and one more of each draft
    unknown: int = 0  # tokens that the step before generates; their places are at the end


class FlatRows(NamedTuple):
    """The rows of a step as arrays."""

    ids: Any  # token ids of all rows, concatenated
    tables: Any  # block tables of all rows, concatenated
    lengths: Any  # tokens per row
    first: Any  # position of each row's first token
    blocks: Any  # blocks per row
    drafts: Any  # drafts per row


class Packer:
    """Fills the buffer, and pads steps to one of a few graph shapes where possible."""

    def __init__(
        self,
        buffer: Any,
        blocks: int,
        block_size: int,
        context: int,
        vocab: int,
        tile: int,
        row_buckets: Sequence[int],
        token_buckets: Sequence[int],
    ) -> None:
        self.buffer = buffer
        self.blocks, self.block_size = blocks, block_size
        self.context, self.vocab = context, vocab
        self.tile = tile  # queries per tile
        self.row_buckets, self.token_buckets = sorted(row_buckets), sorted(token_buckets)
        self.padding_slot = blocks * block_size  # in the block after the pool

    def graph_shapes(self) -> list[GraphShape]:
        """Return all shapes to record, largest first: decodes by rows, prompts and mixed steps by tokens."""
        decodes = [GraphShape(rows, rows, False, True) for rows in self.row_buckets]
        prompts = [self._token_shape(tokens, mixed) for tokens in self.token_buckets for mixed in (False, True)]
        return sorted(decodes + prompts, reverse=True)

    def graph_shape(self, tokens: int, rows: int, singles: int, drafts: int = 0) -> GraphShape:
        """Return the smallest recorded shape that fits the step, or its unpadded shape if none fits."""
        if singles == rows:
            index = bisect_left(self.row_buckets, rows)
            if index < len(self.row_buckets):
                return GraphShape(self.row_buckets[index], self.row_buckets[index], False, True)
        else:
            index = bisect_left(self.token_buckets, tokens)
            if index < len(self.token_buckets) and rows + drafts <= self.row_buckets[-1]:
                return self._token_shape(self.token_buckets[index], singles > 0)
        return GraphShape(tokens, rows + drafts, singles < rows, singles > 0)

    def fill_with_padding(self, shape: GraphShape) -> int:
        """Fill the buffer with a step of padding only; return its number of integers."""
        self.buffer[: shape.end] = 0
        self.buffer[shape.slots : shape.last] = self.padding_slot
        return shape.end

    def pack(self, rows: Sequence[Row], previous: Optional[PackedStep] = None) -> PackedStep:
        """Write the rows into the buffer. Their unknown tokens are those of the previous step."""
        lengths = [len(row.tokens) for row in rows]
        if 0 in lengths:
            raise ValueError("step: expected at least one token in each row")
        singles = lengths.count(1)
        order: Optional[list[int]] = None
        if 0 < singles < len(rows):
            starts = [*accumulate((1 + row.drafts for row in rows), initial=0)]
            packed_rows = sorted(range(len(rows)), key=lambda index: lengths[index] != 1)
            order = [output for index in packed_rows for output in range(starts[index], starts[index + 1])]
            rows = [rows[index] for index in packed_rows]
        flat = self._flatten(rows, 0 if previous is None else previous.outputs)
        drafts = int(flat.drafts.sum())
        shape = self.graph_shape(len(flat.ids), len(rows), singles, drafts)
        packed = PackedStep(shape, self._write(shape, flat, singles), order, len(rows) + drafts)
        return packed if previous is None else self._write_unknown(packed, flat, previous)

    def _token_shape(self, tokens: int, mixed: bool) -> GraphShape:
        return GraphShape(tokens, min(tokens, self.row_buckets[-1]), True, mixed)

    def _flatten(self, rows: Sequence[Row], previous: int) -> FlatRows:
        if not rows:
            raise ValueError("step: expected at least one row")
        tokens, first, tables, drafts = zip(*rows)
        lengths, blocks = np.array([*map(len, tokens)]), np.array([*map(len, tables)])
        ids, joined_tables = _join(tokens, int(lengths.sum())), _join(tables, int(blocks.sum()))
        flat = FlatRows(ids, joined_tables, lengths, np.array(first), blocks, np.array(drafts))
        self._check(flat, previous)
        return flat

    def _check(self, flat: FlatRows, previous: int) -> None:
        """Raise ValueError for rows that would read or write outside the device arrays.

        `previous` is the number of rows of the step before.
        """
        ids, tables, ends = flat.ids, flat.tables, flat.first + flat.lengths
        if flat.first.min() < 0 or ends.max() > self.context:
            raise ValueError(f"step: positions {flat.first.min()}..{ends.max() - 1} outside 0..{self.context - 1}")
        if (flat.blocks * self.block_size < ends).any():
            row = np.flatnonzero(flat.blocks * self.block_size < ends)[0]
            raise ValueError(f"step: {flat.blocks[row]} blocks of {self.block_size} cannot hold {ends[row]} tokens")
        # Read as unsigned, negative numbers are too large and fail the same check.
        if ids.view(np.uint32).max() >= self.vocab and (ids.min() < -previous or ids.max() >= self.vocab):
            raise ValueError(f"step: token ids {ids.min()}..{ids.max()} outside {-previous}..{self.vocab - 1}")
        if tables.view(np.uint32).max() >= self.blocks:
            raise ValueError(f"step: blocks {tables.min()}..{tables.max()} outside 0..{self.blocks - 1}")

    def _write(self, shape: GraphShape, flat: FlatRows, singles: int) -> int:
        tiles = self._tiles(flat, singles) if shape.tiles else None
        tables_at = shape.end + (tiles.size if tiles is not None else 0)
        used = tables_at + len(flat.tables)
        if used > len(self.buffer):
            raise OutOfMemory(f"a step of {len(flat.ids)} tokens and {len(flat.tables)} table entries is too large")
        buffer, rows = self.buffer, len(flat.lengths)
        self.fill_with_padding(shape)
        table_at = flat.blocks.cumsum()
        table_at += tables_at - flat.blocks
        buffer[tables_at:used] = flat.tables
        buffer[shape.tables : shape.tables + rows] = table_at
        buffer[1] = singles
        last = flat.lengths.cumsum() - 1
        outputs = outputs_of(last, flat.drafts)
        buffer[shape.last : shape.last + len(outputs)] = outputs
        self._write_tokens(shape, flat, last - flat.lengths + 1, table_at)
        if tiles is not None:
            buffer[0] = len(tiles)
            tiles[:, 0] = table_at[tiles[:, 0]]
            buffer[shape.end : tables_at] = tiles.ravel()
        return used

    def _write_unknown(self, packed: PackedStep, flat: FlatRows, previous: PackedStep) -> PackedStep:
        unknown = np.flatnonzero(flat.ids < 0)
        start, count = packed.used, len(unknown)
        if start + 2 * count > len(self.buffer):
            raise OutOfMemory(f"a step of {len(flat.ids)} tokens and {len(flat.tables)} table entries is too large")
        rows = -1 - flat.ids[unknown]
        self.buffer[start : start + count] = HEADER + unknown
        self.buffer[start + count : start + 2 * count] = (
            rows if previous.order is None else np.argsort(previous.order)[rows]
        )
        return packed._replace(used=start + 2 * count, unknown=count)

    def _write_tokens(self, shape: GraphShape, flat: FlatRows, starts: Any, table_at: Any) -> None:
        buffer, live, position = self.buffer, len(flat.ids), flat.first
        if live > len(starts):
            position = np.repeat(flat.first - starts, flat.lengths) + np.arange(live)
            table_at = np.repeat(table_at, flat.lengths)
        block, offset = np.divmod(position, self.block_size)
        buffer[HEADER : HEADER + live] = flat.ids
        buffer[shape.positions : shape.positions + live] = position
        buffer[shape.slots : shape.slots + live] = buffer[table_at + block] * self.block_size + offset

    def _tiles(self, flat: FlatRows, singles: int) -> Any:
        """Return the tiles of the longer rows, with the row index instead of the table offset.

        Tiles with the most keys come first: programs take tiles in this order, and a long last tile would end late.
        """
        lengths = flat.lengths[singles:]
        count = -(-lengths // self.tile)
        row = np.repeat(np.arange(len(lengths)), count)
        begin = (np.arange(len(row)) - (count.cumsum() - count)[row]) * self.tile
        size = np.minimum(lengths[row] - begin, self.tile)
        row += singles
        starts = flat.lengths.cumsum() - flat.lengths
        tiles = np.zeros((len(row), PIECE_INTEGERS), np.int32)
        tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = row, starts[row] + begin, size, flat.first[row] + begin
        tiles[:, 5] = tiles[:, 2] + tiles[:, 3]
        return tiles[np.argsort(-tiles[:, 5], kind="stable")]


def outputs_of(last: Any, drafts: Any) -> Any:
    """Return the tokens after which each row wants the next one: its last one, and those before it if it has drafts."""
    if not drafts.any():
        return last
    count = 1 + drafts
    return np.repeat(last + 1 - count.cumsum(), count) + np.arange(count.sum())


def _join(parts: Sequence[Any], total: int) -> Any:
    """Join sequences of integers into one array. array("i") and int32 arrays are 40 times as fast as lists."""
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
