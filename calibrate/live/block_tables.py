"""Which block ids belong to whom, on the device and on the host: the server counts blocks, a backend needs their names.

It follows the server turn by turn as an observer of the driver, and its counts must always equal the server's.
Standard library only, Python 3.9: it runs next to the device. Block 0 belongs to nobody: padding rows write there.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from servesim.core import BadInput, Request
from servesim.engine.server import Server
from servesim.engine.step import Step

NOBODYS = 0  # the block that padding rows write to

Pairs = list[tuple[int, int]]


class BlockTables:
    """The blocks of every request; free ones are taken in the order they came back, as llm-serving takes them."""

    def __init__(self, blocks: int, size: int, host_blocks: int = 0) -> None:
        self.total = blocks
        self.size = size  # tokens a block
        self.free: deque[int] = deque(range(1, blocks + 1))
        self.host_free: deque[int] = deque(range(host_blocks))
        self.tables: dict[Request, array[int]] = {}  # arrays: a backend joins them without looking at each number
        self.hosted: dict[Request, list[int]] = {}
        self.leaving: Pairs = []  # (device, host) copies that the next call begins with
        self.returning: Pairs = []  # (host, device) copies after those

    # -- observing the driver ------------------------------------------------------------------------------------

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        if step.moved:
            self._move(step)
        for chunk in step.chunks:
            self.grow(chunk.request, chunk.request.blocks)
        if step.decoders:
            self._decode(server.running)
        self._agree(server)

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        if over and not server.traits.frees_blocks_late:
            for request in over:
                self.release(request)
            self._agree(server)

    def _move(self, step: Step) -> None:
        moves = step.plan.moves
        for request in moves.release:
            self.release(request)
        for request, how, _ in step.evicted:
            if how == "swap":
                self.leaving += self.out(request)
            elif how != "keep":
                self.release(request)
        for request in (*moves.swap_in, *moves.fetch):
            if request in self.hosted:
                self.returning += self.back(request)
        for rejection in moves.reject:
            self.release(rejection.request)

    def _decode(self, running: Iterable[Request]) -> None:
        """Give a block to every decoding request whose next token begins one."""
        tables, size, free = self.tables, self.size, self.free
        for request in running:
            cohort = request._cohort
            if cohort is not None:
                table = tables[request]
                if len(table) * size <= request._cached + cohort.ticks - request._joined:
                    if not free:
                        self._short(1)
                    table.append(free.popleft())

    def _agree(self, server: Server) -> None:
        """Make sure that the ids and the server's counts tell the same story."""
        pool = server.pool
        if server.policy.paged:
            assert len(self.free) == pool.free, f"{len(self.free)} block ids free, the server counts {pool.free}"
        assert len(self.host_free) == pool.host_free, f"{len(self.host_free)} host ids free, not {pool.host_free}"

    # -- moving blocks -------------------------------------------------------------------------------------------

    def grow(self, request: Request, count: int) -> None:
        """Let a request hold so many blocks."""
        table = self.tables.setdefault(request, array("i"))
        if count - len(table) > len(self.free):
            self._short(count - len(table))
        while len(table) < count:
            table.append(self.free.popleft())

    def release(self, request: Request) -> None:
        """Take back all that a request holds, wherever."""
        self.free.extend(self.tables.pop(request, ()))
        self.host_free.extend(self.hosted.pop(request, ()))

    def out(self, request: Request) -> Pairs:
        """Move a request's blocks to the host; return the copies to make."""
        table = self.tables.pop(request, array("i"))
        self.hosted[request] = [self.host_free.popleft() for _ in table]
        self.free.extend(table)
        return list(zip(table, self.hosted[request]))

    def back(self, request: Request) -> Pairs:
        """Move a request's blocks back to the device; return the copies to make."""
        hosted = self.hosted.pop(request)
        self.tables[request] = array("i", [self.free.popleft() for _ in hosted])
        self.host_free.extend(hosted)
        return list(zip(hosted, self.tables[request]))

    def copies(self) -> tuple[Pairs, Pairs]:
        """Return the copies out and in that the next call begins with; they are then considered made."""
        copies = self.leaving, self.returning
        self.leaving, self.returning = [], []
        return copies

    def _short(self, wanted: int) -> None:
        raise BadInput(
            f"engine.num_blocks: {wanted} more blocks wanted, {len(self.free)} of {self.total} free; this policy "
            "counts no memory, so the device must have enough for all its rows"
        )
