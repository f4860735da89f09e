"""Parallel sampling and beam search: the sequences of one request share KV blocks, and copy them when they write.

How it works. Each live sequence has a block table. A block counts the tables that hold it. A fork copies a table and no
block. A sequence that writes into a block of several tables takes a copy of it first (copy on write). So full blocks of
the prompt are shared to the end, and a partly filled last block is copied by all but one sequence.

After each token, the sequences that go on are given by the positions of their parents. Parallel sampling forks the
sequences of the request at the first token, and each of them ends at its own length. In beam search every step may fork
and drop beams, as recorded. Without a recording, each beam continues a parent that is drawn uniformly from the live
beams, all beams live until the end, and requests have their own random numbers.

Why it is exact. Tables and counts are those of a real block manager, block by block; only block ids are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Optional

from servesim.core import BlockPool, Request, Sampling, SequenceGroup

from .kv_use import KvUse


class Block:
    """A KV block of a group."""

    __slots__ = ("ownerless", "tables")

    def __init__(self, tables: int = 1, ownerless: int = 0) -> None:
        self.tables = tables  # tables that hold it, as the engine counts
        self.ownerless = ownerless  # how many of these do not exist: such a block is never free


class Group(SequenceGroup):
    """The live sequences of one request and their block tables."""

    __slots__ = ("copies", "kv_use", "lengths", "pool", "random", "stop_at", "tables")

    def __init__(self, sampling: Sampling, request: Request, pool: BlockPool, kv_use: KvUse) -> None:
        super().__init__(sampling)
        self.pool = pool
        self.kv_use = kv_use
        self.random: Optional[Random] = None
        if self.beam_search and self.parents is None:
            self.random = Random(f"beams of {request.id}")
        self.stop_at = request.stop_at
        outputs = list(sampling.outputs) or [request.stop_at] * sampling.best_of
        self.lengths = [min(tokens, request.stop_at) for tokens in outputs]  # of the live sequences
        self.tables: list[list[Block]] = [[]]  # of the live sequences
        self.copies = 0  # blocks copied on write

    @property
    def seats(self) -> int:
        return self.best_of if self.beam_search or self.members < self.best_of else self.sequences

    @property
    def shared_blocks(self) -> int:
        """The blocks that sharing saves: without it, each sequence would hold all blocks of its table."""
        return sum(map(len, self.tables)) - self.blocks

    def cover(self, blocks: int) -> None:
        """Give the only live sequence this number of blocks. Each member counts as a table, also if it ended."""
        table = self.tables[0]
        while len(table) < blocks:
            table.append(Block(self.members, self.members - 1))
            self.blocks += 1

    def freed_blocks(self) -> int:
        lost = sum([block.ownerless > 0 for block in self.tables[0]])  # only a request with one sequence has such
        return self.blocks - lost

    def new_blocks(self, length: int) -> int:
        if len(self.tables[0]) * self.pool.block_size < length:
            return self.sequences
        holders: dict[Block, int] = {}
        for table in self.tables:
            holders[table[-1]] = holders.get(table[-1], 0) + 1
        return sum(min(live, block.tables - 1) for block, live in holders.items())

    def append(self, length: int) -> None:
        """Take the blocks of the next token of all live sequences."""
        pool, block_size = self.pool, self.pool.block_size
        for table in self.tables:
            if len(table) * block_size < length:
                table.append(Block())
            elif table[-1].tables > 1:
                index = len(table) - 1
                self.kv_use.tokens += length - 1 - index * block_size  # those of the copy
                self.copies += 1
                shared, table[-1] = table[-1], Block()
                self._release_block(shared, index, length - 1)
            else:
                continue
            pool.free -= 1
            self.blocks += 1

    def _release_block(self, block: Block, index: int, cached: int) -> None:
        """Remove a block from one of its tables. `index`: its position there; `cached`: tokens of the sequence."""
        block.tables -= 1
        if block.tables == block.ownerless:
            if block.tables:
                self.pool.lost += 1
            else:
                self.pool.free += 1
            self.blocks -= 1
            self.kv_use.tokens -= self._stored(index, cached)

    def _stored(self, index: int, cached: int) -> int:
        return max(0, min(self.pool.block_size, cached - index * self.pool.block_size))

    def record_token(self, written: int, cached: int) -> bool:
        """Record the newest token of all live sequences. Return whether one of them goes on."""
        first = self.members == 1
        if first:
            self.members = self.best_of
        self.generated += self.best_of if first else self.sequences
        parents = self._next_beams(written) if self.beam_search else self._unfinished(written, first)
        self.replace(parents, cached)
        return bool(self.sequences)

    def _unfinished(self, written: int, first: bool) -> Sequence[int]:
        """Return the parents of the sequences of parallel sampling that go on."""
        if not self.first_ended:  # otherwise it is not among the live ones
            self.first_ended = self.lengths[0] <= written
        going = [position for position, tokens in enumerate(self.lengths) if tokens > written]
        self.lengths = [self.lengths[position] for position in going]
        return [0] * len(going) if first else going

    def _next_beams(self, written: int) -> Sequence[int]:
        if self.parents is not None:
            return self.parents[written - 1] if written <= len(self.parents) else ()
        if written >= self.stop_at:
            return ()
        assert self.random is not None
        return sorted(self.random.choices(range(self.sequences), k=self.best_of))

    def replace(self, parents: Sequence[int], cached: int) -> None:
        """Continue with the children of these live sequences, and drop the others."""
        before = self.tables
        if list(parents) == list(range(len(before))):
            return
        self.tables = [list(before[parent]) for parent in parents]
        for table in self.tables:
            for block in table:
                block.tables += 1
        for table in before:
            for index, block in enumerate(table):
                self._release_block(block, index, cached)
        self.sequences = len(self.tables)

    def free_blocks(self, cached: int, keeps_tables: bool) -> None:
        """Free the device blocks of all sequences; with `keeps_tables`, they have been copied to the host."""
        if keeps_tables:
            self.pool.free += self.blocks
            self.kv_use.tokens -= self.stored_tokens(cached)
            return
        for table in self.tables:
            for index, block in enumerate(table):
                self._release_block(block, index, cached)
            table.clear()

    def stored_tokens(self, cached: int) -> int:
        """Return the tokens in the different blocks of the live sequences."""
        different = {block: index for table in self.tables for index, block in enumerate(table)}
        return sum(self._stored(index, cached) for index in different.values())

    def check(self) -> None:
        """Verify the counts of blocks. An assertion names what is wrong."""
        holders = Counter(block for table in self.tables for block in table)
        assert len(holders) == self.blocks, f"{len(holders)} blocks in the tables, {self.blocks} counted"
        assert all(block.tables - block.ownerless == count for block, count in holders.items()), "wrong block counts"
        assert self.sequences == len(self.tables), "wrong number of sequences"


def group_of(request: Request) -> Group:
    """Return the sequences of a request that has several."""
    assert isinstance(request.sampling, Group)
    return request.sampling


def stored_tokens(request: Request) -> int:
    """Return the tokens that a request stores; sequences share them."""
    return request.cached if request.sampling is None else group_of(request).stored_tokens(request.cached)
