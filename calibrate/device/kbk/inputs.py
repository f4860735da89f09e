"""The inputs of a model call as numpy arrays: cache slots and block tables of rows, checked against the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servesim.calibrate.device.backend import Model, Row
from servesim.core import BadInput


def check_rows(rows: Sequence[Row], model: Model, block_size: int) -> None:
    """Raise BadInput for a row without tokens, with too few blocks, or longer than the model's context."""
    for row in rows:
        end = row.position + len(row.tokens)
        if not row.tokens or end > model.context or end > len(row.table) * block_size:
            raise BadInput(
                f"row: {len(row.tokens)} tokens after {row.position} cached ones in {len(row.table)} blocks of "
                f"{block_size}, expected at least 1 token, enough blocks, and a length of at most {model.context}"
            )


def cache_slots(row: Row, block_size: int) -> Any:
    """Return the cache slot of each token of a row."""
    import numpy as np

    positions = np.arange(row.position, row.position + len(row.tokens), dtype=np.int32)
    blocks = np.asarray(row.table, np.int32)[positions // block_size]
    return blocks * np.int32(block_size) + positions % np.int32(block_size)


def block_tables(rows: Sequence[Row], lengths: Any, block_size: int, blocks: int) -> Any:
    """Return the block tables as one array, as wide as the longest row needs, padded with -1."""
    import numpy as np

    width = -(-int(lengths.max()) // block_size)
    tables = np.full((len(rows), width), -1, np.int32)
    for table, row in zip(tables, rows):
        used = row.table[:width]
        table[: len(used)] = used
    if tables.max() >= blocks:
        raise BadInput(f"row: block {tables.max()}, expected a block below {blocks}")
    return tables
