"""Block tables of all requests, on the device and on the host. The server counts blocks; a backend needs their ids.

The tables observe every step of the driver. Their counts must always equal the server's.
They run in the worker: Python 3.9, standard library only. Block 0 belongs to no request: padding rows write to it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from servesim.core import BadInput, Request
from servesim.engine.server import Server
from servesim.engine.step import Step

PADDING_BLOCK = 0  # the block that padding rows write to

Pairs = list[tuple[int, int]]


class BlockTables:
    """The block ids of every request. Free blocks are reused in the order they were freed, as in llm-serving."""

    def __init__(self, blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.total = blocks
        self.block_size = block_size  # tokens per block
        self.free: deque[int] = deque(range(1, blocks + 1))
        self.host_free: deque[int] = deque(range(host_blocks))
        self.tables: dict[Request, array[int]] = {}  # arrays: a backend joins them faster than lists
        self.host_tables: dict[Request, list[int]] = {}
        self.late: list[int] = []  # blocks of tokens after the end of requests: free when the step in flight returns
        self.copies_out: Pairs = []  # (device, host) copies to make before the next model call
        self.copies_in: Pairs = []  # (host, device) copies to make after those

    # -- observing the driver ------------------------------------------------------------------------------------

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        if step.has_moves:
            self._move(step)
        for chunk in step.chunks:
            self.grow(chunk.request, chunk.request.blocks)
        if step.decode_rows:
            self._decode(server.running)
        self._check_counts(server)

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        self.free.extend(self.late)
        self.late = []
        held = set(server.finished)  # an engine may free their blocks later
        released = [request for request in finished if request not in held]
        if released:
            for request in released:
                if server.pool.lost:  # the engine frees the block after the last token when its step returns
                    table, used = self.tables[request], server.pool.blocks_for(request.prompt + request.written - 1)
                    self.late += table[used:]
                    del table[used:]
                self.release(request)
            self._check_counts(server)

    def _move(self, step: Step) -> None:
        moves = step.plan.moves
        for request in moves.release:
            self.release(request)
        for request, how, _ in step.preempted:
            if how == "swap":
                self.copies_out += self.swap_out(request)
            elif how != "keep":
                self.release(request)
        for request in moves.swap_in:
            if request in self.host_tables:
                self.copies_in += self.swap_in(request)
        for rejection in moves.reject:
            if rejection.keeps_host_blocks:
                del self.host_tables[rejection.request]  # an engine that never frees them
            self.release(rejection.request)

    def _decode(self, running: Iterable[Request]) -> None:
        """Allocate a block for every decoding request whose next token starts one."""
        tables, size, free = self.tables, self.block_size, self.free
        for request in running:
            cohort = request._cohort
            if cohort is not None:
                table = tables[request]
                if len(table) * size <= request._cached + cohort.steps - request._joined_step:
                    if not free:
                        self._raise_out_of_blocks(1)
                    table.append(free.popleft())

    @property
    def free_count(self) -> int:
        """Number of free device blocks."""
        return len(self.free)

    def _check_counts(self, server: Server) -> None:
        """Check the number of free ids against the server's counts."""
        pool = server.pool
        if server.policy.uses_block_pool:
            assert self.free_count == pool.free, f"{self.free_count} block ids free, the server counts {pool.free}"
        assert len(self.host_free) == pool.host_free, f"{len(self.host_free)} host ids free, not {pool.host_free}"

    # -- moving blocks -------------------------------------------------------------------------------------------

    def grow(self, request: Request, count: int) -> None:
        """Allocate blocks until a request holds `count` of them."""
        table = self.tables.setdefault(request, array("i"))
        if count - len(table) > len(self.free):
            self._raise_out_of_blocks(count - len(table))
        while len(table) < count:
            table.append(self.free.popleft())

    def release(self, request: Request) -> None:
        """Free all device and host blocks of a request."""
        self.free.extend(self.tables.pop(request, ()))
        self.host_free.extend(self.host_tables.pop(request, ()))

    def swap_out(self, request: Request) -> Pairs:
        """Move the blocks of a request to the host; return the copies to make."""
        table = self.tables.pop(request, array("i"))
        self.host_tables[request] = [self.host_free.popleft() for _ in table]
        self.free.extend(table)
        return list(zip(table, self.host_tables[request]))

    def swap_in(self, request: Request) -> Pairs:
        """Move the blocks of a request back to the device; return the copies to make."""
        host_table = self.host_tables.pop(request)
        self.tables[request] = array("i", [self.free.popleft() for _ in host_table])
        self.host_free.extend(host_table)
        return list(zip(host_table, self.tables[request]))

    def _raise_out_of_blocks(self, count: int) -> None:
        raise BadInput(
            f"engine.num_blocks: {count} more blocks needed, {len(self.free)} of {self.total} free; set a larger "
            "number. This policy does not count blocks, so the device needs enough for all rows"
        )
