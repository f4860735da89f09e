"""llm-serving without PagedAttention: a list of rows, filled up with copies that are computed like prompts."""

from __future__ import annotations

from itertools import islice
from typing import Optional, Union

from ..core import FOREVER, Chunk, Plan, Request, View

COPY = "copy"  # a padding row whose prompt has not been run yet
Row = Optional[Union[Request, str]]  # None is a padding row that has
Rows = tuple[Row, ...]


def decide_unpaged(view: View, batch: int, prefill: int, static: bool) -> Plan:
    """Return the next call of the static or the continuous strategy; its memory is the list of rows."""
    rows, admit = fill(view, view.memory, batch, static)
    chunks: list[Chunk] = []
    copies = 0
    for place, row in enumerate(rows):
        if len(chunks) + copies == prefill:
            break
        if row is COPY:
            copies += 1
            rows = (*rows[:place], None, *rows[place + 1 :])
        elif isinstance(row, Request) and row.place != "done" and not row.decodes:
            chunks.append(Chunk(row, row.pending))
    if chunks or copies:
        return Plan(admit=admit, chunks=chunks, padding=copies, memory=rows)
    if view.decoding:
        return Plan(admit=admit, decode=True, hold=FOREVER, memory=rows)
    return Plan(memory=rows)


def fill(view: View, rows: Rows, batch: int, static: bool) -> tuple[Rows, list[Request]]:
    """Return the rows after new requests took theirs, and who they are."""
    over = [isinstance(row, Request) and row.place == "done" for row in rows]
    live = [isinstance(row, Request) and row.place != "done" for row in rows]
    # A copy never counts as over: the continuous list is then refilled row by row instead of made anew.
    if all(over) or (static and not any(live)):
        fresh: list[Request] = list(islice(view.waiting, batch))
        return (*fresh, *([COPY] * (batch - len(fresh) if fresh else 0))), fresh
    if static or not view.waiting:
        return rows, []
    waiting = iter(view.waiting)
    filled = list(rows)
    admit = []
    for place, _row in enumerate(rows):
        if not live[place]:
            request = next(waiting, None)
            if request is None:
                break
            filled[place] = request
            admit.append(request)
    return tuple(filled), admit
