"""The KV cache of vLLM V1 with several groups of layers: a list of blocks per request and group.

How it works. All groups share one pool of equal blocks (block_ring.py); a block holds the tokens of one group's layers.
A group with a window frees the blocks that its requests read no more.

Why it is exact. A policy makes the changes of its plan on this object, so that it sees what each of them leaves, and
the plan lists them. If the engine carries out this plan, they stay; otherwise they are taken back before anything else
happens, and the changes of another plan are made.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Final, NamedTuple, Optional

from servesim.core import FOREVER, BlockPool, CacheDraft, Chunk, Request
from servesim.engine.kv_cache import KvCache
from servesim.engine.texts import Text

from .block_ring import Block, BlockRing
from .window_rules import Hit, Keys, WindowRules, find_hit

SLIDE: Final = 0  # free what is out of the windows
TAKE: Final = 1  # take blocks for further tokens, after those of a hit, and name the full ones
LEAVE: Final = 2  # free all blocks


class Change(NamedTuple):
    """A change that a plan makes."""

    kind: int
    request: Request
    tokens: int = 0  # SLIDE: tokens whose results are known; others: those whose full blocks get names
    blocks: int = 0  # that each group has afterwards
    hit: Optional[Hit] = None


class Table:
    """The blocks of a running request, by group. Those at the beginning that a window has left behind are None."""

    __slots__ = ("ends", "gone", "groups", "named")

    def __init__(self, rules: WindowRules, prompt: int, hit: Hit) -> None:
        self.groups: list[list[Optional[Block]]] = [[] for _ in rules.windows]
        self.gone = list(hit.gone)  # by group: how many are None
        self.named = hit.blocks  # full blocks that have a name if the rules give them one
        self.ends = rules.ends(prompt, hit.junction)

    def set_named(self, blocks: int) -> None:
        self.named = blocks

    @property
    def length(self) -> int:
        """The blocks of each group, with those that are None."""
        return len(self.groups[0])

    @property
    def held(self) -> int:
        return len(self.groups) * self.length - sum(self.gone)


class GroupCache(KvCache):
    """The blocks of one server."""

    __slots__ = (
        "_changes", "_keys", "_pieces", "_undo", "caches", "cells", "due", "in_step", "newest", "ring", "rules",
        "tables",
    )  # fmt: skip

    def __init__(self, pool: BlockPool, rules: WindowRules, caches: bool, apart: bool, appends_all: bool) -> None:
        super().__init__(pool, apart)
        self.takes_blocks = True
        self.rules = rules
        self.caches = caches  # otherwise no block gets a name
        self.ring = BlockRing(pool.total, len(rules.windows), appends_all)
        self.tables: dict[Request, Table] = {}  # running requests
        self.cells = 0  # places for blocks in all tables
        # Tokens of the newest step, if it may still read what is behind a window: of a chunk, and of other decodes.
        self.newest: dict[Request, int] = {}
        self.in_step = 0
        self.due: list[Request] = []  # decodes that change the cache in the next step, or may do so
        self._keys: dict[Request, Keys] = {}
        self._pieces: dict[Hashable, int] = {}
        self._undo: Optional[list[tuple[Any, ...]]] = None  # in a draft: calls that take back the changes of tables
        self._changes: Optional[list[Change]] = None  # those of a plan that the draft has made

    @property
    def free(self) -> int:
        return self.ring.free

    @property
    def idle_blocks(self) -> int:
        return self.ring.idle

    @property
    def shares(self) -> bool:
        """False: what it knows when a step returns, the rows of the step tell it in their order."""
        return False

    @property
    def absent(self) -> int:
        """Tokens in the places of tables that take no memory: behind a window, or in a block of another request."""
        return (self.cells - self.pool.total + self.ring.free) * self.pool.block_size

    def start_draft(self) -> None:
        """Start to make the changes of a plan."""
        self.roll_back()
        self._undo = []
        self.ring.start_draft()

    def end_draft(self, changes: list[Change]) -> None:
        """Note the changes of the plan, all of which are made."""
        self._changes = changes

    def roll_back(self) -> None:
        """Take back the changes of a plan that is not carried out."""
        undo, self._undo, self._changes = self._undo, None, None
        if undo is None:
            return
        self.ring.roll_back()
        while undo:
            call = undo.pop()
            call[0](*call[1:])

    def carry_out(self, changes: Optional[list[Change]]) -> None:
        """Make the changes of a plan, unless the draft has made them."""
        if changes is not None and changes is self._changes:
            self._undo = self._changes = None
            self.ring.keep_draft()
        else:
            self.roll_back()
            for change in changes or ():
                self.make(change)
        for change in changes or ():
            table = self.tables.get(change.request)
            if table is not None:
                change.request._blocks = table.held
        self.pool.free, self.stats.evicted_blocks = self.ring.free, self.ring.evicted

    def make(self, change: Change) -> None:
        """Make one change."""
        request = change.request
        if change.kind == SLIDE:
            self._slide(self.tables[request], change.tokens)
        elif change.kind == LEAVE:
            self._leave(request)
        else:
            if change.hit is not None:
                self._enter(request, change.hit)
            table = self.tables[request]
            self._add_cells(table, change.blocks - table.length)
            self._name_full(request, table, change.tokens)

    def _add_cells(self, table: Table, more: int) -> None:
        if more <= 0:
            return
        length, take = table.length, self.ring.take
        for cells in table.groups:
            for _ in range(more):
                cells.append(take())
        self._count_cells(more * len(table.groups))
        if self._undo is not None:
            self._undo.append((self._drop_cells, table, length))

    def _drop_cells(self, table: Table, length: int) -> None:
        self.cells -= len(table.groups) * (table.length - length)
        for cells in table.groups:
            del cells[length:]

    def _count_cells(self, more: int) -> None:
        self.cells += more

    def _slide(self, table: Table, processed: int) -> None:
        for kind in self.rules.sliding:
            out = min(self.rules.out(kind, processed), table.length)
            for group in kind.groups:
                gone = table.gone[group]
                if out > gone:
                    cells = table.groups[group]
                    freed = cells[gone:out]
                    if self._undo is not None:
                        self._undo.append((cells.__setitem__, slice(gone, out), freed))
                        self._undo.append((table.gone.__setitem__, group, gone))
                    cells[gone:out] = [None] * len(freed)
                    table.gone[group] = out
                    self.ring.give_up(freed[::-1])

    def _enter(self, request: Request, hit: Hit) -> None:
        """Give a request the blocks of its cached tokens. All are held before others are taken."""
        keys = self.keys_of(request, hit.blocks) if hit.blocks else []
        table = Table(self.rules, request.prompt, hit)
        for gone, cells, names in zip(hit.gone, table.groups, self.ring.names):
            cells.extend([None] * gone)
            for key in keys[gone : hit.blocks]:
                block = names[key]
                self.ring.share(block)
                cells.append(block)
        self.tables[request] = table
        more = hit.blocks * len(table.groups)
        self.cells += more
        if self._undo is not None:
            self._undo.append((self.tables.pop, request))
            self._undo.append((self._count_cells, -more))

    def _name_full(self, request: Request, table: Table, known: int) -> None:
        start, end = table.named, self.full_blocks(known)
        if end <= start:
            return
        if self._undo is not None:
            self._undo.append((table.set_named, start))
        table.named = end
        keys = self.keys_of(request, end)
        for kind in self.rules.kinds:
            for index in range(max(start, table.gone[kind.groups[0]]), end):
                if kind.window is not None and not self.rules.names(kind, index, table.ends):
                    continue
                for group in kind.groups:
                    block = table.groups[group][index]
                    assert block is not None
                    self.ring.name(block, group, keys[index])

    def full_blocks(self, known: int) -> int:
        """Return how many blocks have their names, or none for good, if these tokens are known."""
        return max(0, known - self.rules.unnamed) // self.pool.block_size if self.caches else 0

    def _leave(self, request: Request) -> None:
        """Free all blocks of a request, group by group, the last one first."""
        table = self.tables.pop(request)
        more = -table.length * len(table.groups)
        self.cells += more
        if self._undo is not None:
            self._undo.append((self.tables.__setitem__, request, table))
            self._undo.append((self._count_cells, -more))
        for gone, cells in zip(table.gone, table.groups):
            self.ring.give_up(cells[gone:][::-1])

    def processed(self, request: Request) -> int:
        """Return the tokens of a running request that no step in flight computes."""
        tokens = self.newest.get(request, -1) if self.newest else -1
        if tokens < 0:
            tokens = self.in_step if request._cohort is not None else 0
        return request.cached - tokens

    def unchanged_up_to(self, request: Request, ahead: int, in_flight: int) -> int:
        """Return the most computed tokens with which the next decode of a request changes nothing.

        It needs blocks for `ahead` tokens after them; of them, this number is in flight.
        """
        table, size = self.tables[request], self.pool.block_size
        most = table.length * size - ahead
        for kind in self.rules.sliding:
            most = min(most, (table.gone[kind.groups[0]] + 1) * size + kind.reach + self.in_step - 1)
        if self.caches:
            most = min(most, (table.named + 1) * size + self.rules.unnamed + in_flight - 2)
        return most

    def keys_of(self, request: Request, blocks: int) -> list[int]:
        """Return the keys of at least the first blocks of a request."""
        keys = self._keys.get(request)
        if keys is None:
            text = self.text_of(request)
            if text is None:  # it shares nothing: one piece
                text = Text(request)
                text.ends[0] = FOREVER
            keys = self._keys[request] = Keys(text)
        return keys.extend(blocks, self.pool.block_size, self._pieces)

    def find(self, request: Request) -> Hit:
        """Return what the cache has of a waiting request."""
        names = self.ring.names
        if not self.caches:
            return Hit(0, (0,) * len(names), 0)
        known = request.prompt + request._written - request._in_flight
        return find_hit(self.rules, names, self.keys_of(request, known // self.pool.block_size), known)

    def idle_of(self, request: Request, hit: Hit) -> int:
        """Return how many blocks of a hit no request holds."""
        if not hit.blocks:
            return 0
        keys = self.keys_of(request, hit.blocks)
        return sum([
            not names[key].refs for gone, names in zip(hit.gone, self.ring.names) for key in keys[gone : hit.blocks]
        ])  # fmt: skip

    def cached_tokens(self, text: Text, tokens: int) -> int:
        self.roll_back()
        size = self.pool.block_size
        keys = Keys(text).extend(tokens // size, size, self._pieces)
        return find_hit(self.rules, self.ring.names, keys, tokens + 1).blocks * size if self.caches else 0

    def admit(self, request: Request, cached: int, decodes: bool = True) -> int:
        if self.caches:
            self.stats.count(request, cached)
        return cached // self.pool.block_size

    def note_known(self, request: Request) -> None:
        self.roll_back()
        table = self.tables.get(request)
        if table is not None:  # otherwise the plan that is carried out preempts it
            self._name_full(request, table, self.returned(request))

    def returned(self, request: Request) -> int:
        """Return the computed tokens of a request whose values are known."""
        return min(request.cached, request.length - 1) - request.in_flight

    def release(self, request: Request, known: int, may_return: bool) -> int:
        self.roll_back()
        if request in self.tables:
            self._leave(request)
            self.pool.free = self.ring.free
        if not may_return:
            self._keys.pop(request, None)
            self._texts.pop(request, None)
        request._blocks = 0
        return known

    def clear(self) -> None:
        self.roll_back()
        self.ring.clear_names()

    def check(self, running: Iterable[Request], tokens: int) -> None:
        """Verify the tables, the blocks in them and the number of stored tokens."""
        assert self._undo is None, "a draft was not taken back"
        assert set(running) == set(self.tables), "tables of other requests"
        held: list[Block] = []
        for request, table in self.tables.items():
            assert {len(cells) for cells in table.groups} == {table.length} and request._blocks == table.held
            for gone, cells in zip(table.gone, table.groups):
                assert not any(cells[:gone]) and all(cells[gone:]), "a block before the window, or none after it"
                held += [block for block in cells if block is not None]
        self.ring.check(held)
        assert self.ring.free == self.pool.free == self.pool.total - len(set(held)), "blocks are lost"
        assert self.cells == sum(table.length * len(table.groups) for table in self.tables.values()), "wrong cells"
        assert tokens == sum(request.cached for request in self.tables), "wrong number of stored tokens"


class GroupDraft(CacheDraft):
    """What a policy sees of the cache: the cache itself, on which it makes the changes of its plan."""

    __slots__ = ("cache",)

    def __init__(self, cache: GroupCache) -> None:
        self.cache = cache

    def start(self, chunks: Iterable[Chunk] = (), decodes: bool = True) -> None:
        """Do nothing: the changes of a plan are made one after another."""
