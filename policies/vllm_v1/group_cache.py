"""The KV cache of vLLM V1 with several groups of layers: real blocks, and a list of them per request and group.

How it works. All groups share one pool of equal blocks; a block holds the tokens of one group's layers. A group with a
window frees the blocks that its requests read no more. Free blocks are in a ring, in the order in which they are handed
out. A block keeps its name, which says its group and its text up to its end, until it is handed out again.

Why it is exact. A policy makes the changes of its plan on this object, so that it sees what each of them leaves, and
`roll_back` takes them back in the reverse order. The plan lists them, and the engine makes them once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Final, NamedTuple, Optional

from servesim.core import FOREVER, BlockPool, CacheDraft, Chunk, Request
from servesim.engine.kv_cache import KvCache
from servesim.engine.texts import Text

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


class Block:
    """A KV block."""

    __slots__ = ("after", "before", "group", "key", "refs")

    def __init__(self) -> None:
        self.before = self.after = self  # its neighbours in the ring of free blocks
        self.refs = 0  # requests that hold it
        self.group = 0
        self.key: Hashable = None  # with the group, its name; None: it has none


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
        "_ends", "_fresh", "_keys", "_pieces", "_undo", "_unused", "appends_all", "caches", "free", "idle", "names",
        "newest", "rules", "tables",
    )  # fmt: skip

    def __init__(self, pool: BlockPool, rules: WindowRules, caches: bool, apart: bool, appends_all: bool) -> None:
        super().__init__(pool, apart)
        self.takes_blocks = True
        self.rules = rules
        self.caches = caches  # otherwise no block gets a name
        self.appends_all = appends_all  # also blocks without a name are handed out last
        self.tables: dict[Request, Table] = {}  # running requests
        self.newest: dict[Request, int] = {}  # tokens of the step in flight
        self.free, self.idle = pool.total, 0  # free blocks, and those of them with a name
        self.names: list[dict[Hashable, list[Block]]] = [{} for _ in rules.windows]  # the first named one first
        self._keys: dict[Request, Keys] = {}
        self._pieces: dict[Hashable, int] = {}
        self._undo: Optional[list[tuple[Any, ...]]] = None  # in a draft: calls that take back its changes
        self._unused = pool.total  # blocks that no request had so far; `_fresh` has their place in the ring
        self._ends, self._fresh = Block(), Block()
        self._insert(self._fresh, self._ends)

    @property
    def idle_blocks(self) -> int:
        return self.idle

    @property
    def shares(self) -> bool:
        """False: what it knows when a step returns, the rows of the step tell it in their order."""
        return False

    def _note(self, *undo: Any) -> None:
        if self._undo is not None:
            self._undo.append(undo)

    def _insert(self, block: Block, after: Block) -> None:
        block.before, block.after = after.before, after
        block.before.after = after.before = block

    def _link(self, block: Block, after: Block) -> None:
        """Put a block that one request has held into the ring, before another one."""
        self._insert(block, after)
        block.refs = 0
        self.free += 1
        if block.key is not None:
            self.idle += 1
        if self._undo is not None:  # as `_note`, which costs more
            self._undo.append((self._unlink, block))

    def _unlink(self, block: Block) -> None:
        """Take a block out of the ring, for one request."""
        block.before.after, block.after.before = block.after, block.before
        block.refs = 1
        self.free -= 1
        if block.key is not None:
            self.idle -= 1
        if self._undo is not None:
            self._undo.append((self._link, block, block.after))

    def _count(self, block: Block, more: int) -> None:
        """Change the number of requests that hold a block; some do before and afterwards."""
        block.refs += more
        self._note(self._count, block, -more)

    def _name(self, block: Block, group: int, key: Hashable, place: int) -> None:
        block.group, block.key = group, key
        self.names[group].setdefault(key, []).insert(place, block)
        if self._undo is not None:
            self._undo.append((self._unname, block))

    def _unname(self, block: Block) -> None:
        names = self.names[block.group]
        blocks = names[block.key]
        self._note(self._name, block, block.group, block.key, blocks.index(block))
        blocks.remove(block)
        if not blocks:
            del names[block.key]
        block.key = None

    def _unmake(self, block: Block) -> None:
        block.before.after, block.after.before = block.after, block.before
        self._unused += 1

    def _take(self) -> Block:
        """Return the first free block. It loses its name."""
        block = self._ends.after
        if block is self._fresh:
            block = block.after
            if self._unused:
                self._unused -= 1
                self._insert(block := Block(), self._fresh)
                self._note(self._unmake, block)
        assert block is not self._ends, "the plan needs more blocks than are free"
        self._unlink(block)
        if block.key is not None:
            self._unname(block)
            self.stats.evicted_blocks += self._undo is None
        return block

    def _free(self, blocks: Iterable[Optional[Block]]) -> None:
        """Give up blocks: those without a name are handed out first, in this order, those with a name last."""
        first, named = self._ends.after, []
        for block in blocks:
            assert block is not None
            if block.refs > 1:
                self._count(block, -1)
            elif block.key is None and not self.appends_all:
                self._link(block, first)
            else:
                named.append(block)
        for block in named:
            self._link(block, self._ends)

    def start_draft(self) -> None:
        self._undo = []

    def roll_back(self) -> None:
        """Take back all changes of a draft."""
        undo, self._undo = self._undo, None
        for call in reversed(undo or ()):
            call[0](*call[1:])

    def carry_out(self, changes: Iterable[Change]) -> None:
        """Make the changes of a plan."""
        for change in changes:
            self.make(change)
            if change.kind != LEAVE:
                change.request._blocks = self.tables[change.request].held
        self.pool.free = self.free

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
            for cells in table.groups:
                for _ in range(change.blocks - len(cells)):
                    cells.append(self._take())
                    if self._undo is not None:
                        self._undo.append((cells.pop,))
            self._name_full(request, table, change.tokens)

    def _slide(self, table: Table, processed: int) -> None:
        for kind in self.rules.sliding:
            out = min(self.rules.out(kind, processed), table.length)
            for group in kind.groups:
                gone = table.gone[group]
                if out > gone:
                    cells = table.groups[group]
                    freed = cells[gone:out]
                    self._note(cells.__setitem__, slice(gone, out), freed)
                    self._note(table.gone.__setitem__, group, gone)
                    cells[gone:out] = [None] * len(freed)
                    table.gone[group] = out
                    self._free(reversed(freed))

    def _enter(self, request: Request, hit: Hit) -> None:
        """Give a request the blocks of its cached tokens. All are held before others are taken."""
        keys, table = self.keys_of(request, hit.blocks), Table(self.rules, request.prompt, hit)
        for gone, cells, names in zip(hit.gone, table.groups, self.names):
            cells.extend([None] * gone)
            for key in keys[gone : hit.blocks]:
                block = names[key][0]
                if block.refs:
                    self._count(block, 1)
                else:
                    self._unlink(block)
                cells.append(block)
        self.tables[request] = table
        self._note(self.tables.pop, request)

    def _name_full(self, request: Request, table: Table, known: int) -> None:
        start, end = table.named, self.full_blocks(known)
        if end <= start:
            return
        self._note(table.set_named, start)
        table.named = end
        keys = self.keys_of(request, end)
        for kind in self.rules.kinds:
            for index in range(max(start, table.gone[kind.groups[0]]), end):
                if kind.window is not None and not self.rules.names(kind, index, table.ends):
                    continue
                for group in kind.groups:
                    block = table.groups[group][index]
                    assert block is not None
                    self._name(block, group, keys[index], len(self.names[group].get(keys[index], ())))

    def full_blocks(self, known: int) -> int:
        """Return how many blocks have their names, or none for good, if these tokens are known."""
        return max(0, known - self.rules.unnamed) // self.pool.block_size if self.caches else 0

    def _leave(self, request: Request) -> None:
        """Free all blocks of a request, group by group, the last one first."""
        table = self.tables.pop(request)
        self._note(self.tables.__setitem__, request, table)
        for gone, cells in zip(table.gone, table.groups):
            self._free(reversed(cells[gone:]))

    def keys_of(self, request: Request, blocks: int) -> list[Hashable]:
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
        if not self.caches:
            return Hit(0, (0,) * len(self.names), 0)
        known = request.prompt + request._written - request._in_flight
        return find_hit(self.rules, self.names, self.keys_of(request, known // self.pool.block_size), known)

    def idle_of(self, request: Request, hit: Hit) -> int:
        """Return how many blocks of a hit no request holds."""
        keys = self.keys_of(request, hit.blocks)
        return sum([
            not names[key][0].refs for gone, names in zip(hit.gone, self.names) for key in keys[gone : hit.blocks]
        ])  # fmt: skip

    def cached_tokens(self, text: Text, tokens: int) -> int:
        size = self.pool.block_size
        keys = Keys(text).extend(tokens // size, size, self._pieces)
        return find_hit(self.rules, self.names, keys, tokens + 1).blocks * size if self.caches else 0

    def admit(self, request: Request, cached: int, decodes: bool = True) -> int:
        if self.caches:
            self.stats.count(request, cached)
        return 0

    def note_known(self, request: Request) -> None:
        if self.caches:
            known = min(request._cached, request.prompt + request._written - 1) - request._in_flight
            self._name_full(request, self.tables[request], known)

    def release(self, request: Request, known: int, may_return: bool) -> int:
        if request in self.tables:
            self._leave(request)
            self.pool.free = self.free
        if not may_return:
            self._keys.pop(request, None)
            self._texts.pop(request, None)
        request._blocks = 0
        return 0

    def stored_tokens(self) -> int:
        """Return the tokens in the blocks that requests hold; a token counts in each group that has it."""
        slack = 0  # places without a token, in one group
        for request, table in self.tables.items():
            slack += table.length * self.pool.block_size - request._cached
        return self.pool.held * self.pool.block_size - slack * len(self.names)

    def clear(self) -> None:
        block = self._ends.after
        while block is not self._ends:
            if block.key is not None:
                self.idle -= 1
                self._unname(block)
            block = block.after

    def check(self, running: Iterable[Request], tokens: int) -> None:
        """Verify the references, the ring, the names and the number of free blocks."""
        assert self._undo is None, "a draft was not taken back"
        assert set(running) == set(self.tables), "tables of other requests"
        refs: dict[Block, int] = {}
        for request, table in self.tables.items():
            assert {len(cells) for cells in table.groups} == {table.length} and request._blocks == table.held
            for gone, cells in zip(table.gone, table.groups):
                assert not any(cells[:gone]) and all(cells[gone:]), "a block before the window, or none after it"
                for block in cells[gone:]:
                    assert block is not None
                    refs[block] = refs.get(block, 0) + 1
        free, block = [], self._ends.after
        while block is not self._ends:
            if block is not self._fresh:
                free.append(block)
            block = block.after
        assert all(block.refs == count for block, count in refs.items()) and not any(b.refs for b in free)
        assert len(free) + self._unused == self.free == self.pool.free == self.pool.total - len(refs), "blocks are lost"
        assert self.idle == sum(block.key is not None for block in free), "wrong number of idle blocks"
        named = {block for names in self.names for blocks in names.values() for block in blocks}
        assert named == {block for block in (*refs, *free) if block.key is not None}, "wrong names"


class GroupDraft(CacheDraft):
    """What a policy sees of the cache: the cache itself, on which it makes the changes of its plan and undoes them."""

    __slots__ = ("cache",)

    def __init__(self, cache: GroupCache) -> None:
        self.cache = cache

    def start(self, chunks: Iterable[Chunk] = (), decodes: bool = True) -> None:
        """Do nothing: the changes of a plan are made one after another."""
