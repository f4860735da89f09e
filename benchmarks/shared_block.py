"""A broken allocator for checks of the token check: it gives one block to two requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def broken_allocator(times: int = 1) -> Iterator[None]:
    """Let tables of a run share their first block with another one, `times` times. The counts of blocks stay right."""
    from servesim.calibrate.live.block_tables import BlockTables

    grow = BlockTables.grow

    def broken_grow(self: Any, request: Any, count: int) -> None:
        grow(self, request, count)
        table = self.tables[request]
        shared = self.__dict__.setdefault("shared", [])  # blocks in two tables
        others = [other for other in self.tables.values() if other is not table and len(other) > 1]
        other = next((other for other in others if other[0] not in shared), None)
        if len(shared) < times and other is not None and len(table) > 1 and table[0] not in shared:
            table[0] = other[0]
            shared.append(other[0])

    BlockTables.grow = broken_grow  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockTables.grow = grow  # type: ignore[method-assign]
