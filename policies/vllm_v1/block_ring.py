"""The KV blocks of a server with KV cache groups: the order in which free ones are handed out, names, and a draft.

How it works. Free blocks are in a ring, the next one first. A block keeps its name, which says its group and its text
up to its end, until it is handed out again. Blocks with the same name are in a chain, the first named one first.

Why it is exact. Every change in a draft is noted; `roll_back` takes them back in the reverse order. `keep_draft` keeps
them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Optional

NO_KEY: Final = -1
# Changes in a draft. Below, `other` is a block that the change needs to be taken back.
LINKED: Final = 0
UNLINKED: Final = 1  # from its place before `other`
COUNTED: Final = 2  # `number` more requests hold it
NAMED: Final = 3
UNNAMED: Final = 4  # it had the key `number`, behind `other` in its chain; at the beginning if `other` is the block
MADE: Final = 5


class Block:
    """A KV block."""

    __slots__ = ("after", "before", "group", "key", "next", "refs")

    def __init__(self) -> None:
        self.before = self.after = self  # its neighbours in the ring of free blocks
        self.refs = 0  # requests that hold it
        self.group = 0
        self.key = NO_KEY  # with the group, its name
        self.next: Optional[Block] = None  # that has the same name


class BlockRing:
    """All blocks."""

    __slots__ = ("_draft", "_ends", "_evicted", "_fresh", "_unused", "appends_all", "evicted", "free", "idle", "names")

    def __init__(self, total: int, groups: int, appends_all: bool) -> None:
        self.appends_all = appends_all  # also blocks without a name are handed out last
        self.free, self.idle = total, 0  # free blocks, and those of them with a name
        self.evicted = 0  # blocks that were handed out again and lost their names
        self.names: list[dict[int, Block]] = [{} for _ in range(groups)]  # by group and key, the first block of a chain
        self._draft: Optional[list[tuple[int, Block, Block, int, int]]] = None
        self._evicted = 0  # before the draft
        self._unused = total  # blocks that no request had so far; `_fresh` has their place in the ring
        self._ends, self._fresh = Block(), Block()
        insert(self._fresh, self._ends)

    def start_draft(self) -> None:
        self._draft, self._evicted = [], self.evicted

    def keep_draft(self) -> None:
        self._draft = None

    def roll_back(self) -> None:
        """Take back all changes of a draft."""
        draft, self._draft = self._draft, None
        if draft is None:
            return
        self.evicted = self._evicted
        while draft:
            kind, block, other, number, group = draft.pop()
            if kind == LINKED:
                self._unlink(block)
            elif kind == UNLINKED:
                self._link(block, other)
            elif kind == COUNTED:
                block.refs -= number
            elif kind == NAMED:
                self._unname(block)
            elif kind == UNNAMED:
                self._name(block, group, number, None if other is block else other)
            else:
                remove(block)
                self._unused += 1

    def _note(self, kind: int, block: Block, other: Block, number: int = 0) -> None:
        if self._draft is not None:
            self._draft.append((kind, block, other, number, block.group))

    def _link(self, block: Block, after: Block) -> None:
        """Put a block that one request has held into the ring, before another one."""
        insert(block, after)
        block.refs = 0
        self.free += 1
        if block.key != NO_KEY:
            self.idle += 1
        self._note(LINKED, block, after)

    def _unlink(self, block: Block) -> None:
        """Take a block out of the ring, for one request."""
        self._note(UNLINKED, block, block.after)
        remove(block)
        block.refs = 1
        self.free -= 1
        if block.key != NO_KEY:
            self.idle -= 1

    def name(self, block: Block, group: int, key: int) -> None:
        """Give a block a name, behind the others that have it."""
        last = self.names[group].get(key)
        while last is not None and last.next is not None:
            last = last.next
        self._name(block, group, key, last)

    def _name(self, block: Block, group: int, key: int, before: Optional[Block]) -> None:
        block.group, block.key = group, key
        if before is None:
            block.next = self.names[group].get(key)
            self.names[group][key] = block
        else:
            block.next, before.next = before.next, block
        self._note(NAMED, block, block)

    def _unname(self, block: Block) -> None:
        names, before = self.names[block.group], block
        first = names[block.key]
        if first is not block:
            before = first
            while before.next is not None and before.next is not block:
                before = before.next
            before.next = block.next
        elif block.next is not None:
            names[block.key] = block.next
        else:
            del names[block.key]
        self._note(UNNAMED, block, before, block.key)
        block.key, block.next = NO_KEY, None

    def take(self) -> Block:
        """Return the first free block. It loses its name."""
        block = self._ends.after
        if block is self._fresh:
            block = block.after
            if self._unused:
                self._unused -= 1
                insert(block := Block(), self._fresh)
                self._note(MADE, block, block)
        assert block is not self._ends, "the plan needs more blocks than are free"
        self._unlink(block)
        if block.key != NO_KEY:
            self._unname(block)
            self.evicted += 1
        return block

    def share(self, block: Block) -> None:
        """Let one more request hold a block."""
        if block.refs:
            block.refs += 1
            self._note(COUNTED, block, block, 1)
        else:
            self._unlink(block)

    def give_up(self, blocks: Iterable[Optional[Block]]) -> None:
        """Let a request hold these no more: those without a name are handed out first, in this order, others last."""
        first, last = self._ends.after, []
        for block in blocks:
            assert block is not None
            if block.refs > 1:
                block.refs -= 1
                self._note(COUNTED, block, block, -1)
            elif block.key == NO_KEY and not self.appends_all:
                self._link(block, first)
            else:
                last.append(block)
        for block in last:
            self._link(block, self._ends)

    def clear_names(self) -> None:
        """Forget the names of free blocks."""
        for block in self.in_order():
            if block.key != NO_KEY:
                self.idle -= 1
                self._unname(block)

    def in_order(self) -> Iterator[Block]:
        """Return the free blocks that a request had before, the next one first."""
        block = self._ends.after
        while block is not self._ends:
            if block is not self._fresh:
                yield block
            block = block.after

    def check(self, held: Iterable[Block]) -> None:
        """Verify the ring, the names and the number of free blocks. `held`: blocks of requests, once for each."""
        refs: dict[Block, int] = {}
        for block in held:
            refs[block] = refs.get(block, 0) + 1
        free = list(self.in_order())
        assert all(block.refs == count for block, count in refs.items()) and not any(b.refs for b in free)
        assert len(free) + self._unused == self.free, "blocks are lost"
        assert self.idle == sum(block.key != NO_KEY for block in free), "wrong number of idle blocks"
        named = []
        for names in self.names:
            for first in names.values():
                block_in_chain: Optional[Block] = first
                while block_in_chain is not None:
                    named.append(block_in_chain)
                    block_in_chain = block_in_chain.next
        assert len(named) == len(set(named)), "a block has two names"
        assert set(named) == {block for block in (*refs, *free) if block.key != NO_KEY}, "wrong names"


def insert(block: Block, after: Block) -> None:
    """Put a block into a ring, before another one."""
    block.before, block.after = after.before, after
    block.before.after = after.before = block


def remove(block: Block) -> None:
    """Take a block out of a ring."""
    block.before.after, block.after.before = block.after, block.before
