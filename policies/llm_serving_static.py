"""llm-serving's batches of rows, filled up with copies that are computed like prompts: all but its paged strategy."""

from __future__ import annotations

from itertools import islice
from typing import Optional, Union

from servesim.core import FOREVER, Chunk, Plan, Queue, Rejection, Request, Stuck, View

COPY = "copy"  # a padding row whose prompt has not been run yet
GONE = "gone"  # a copy of a request that was out of range, which left with it
Row = Optional[Union[Request, str]]  # None is a padding row that has
Rows = tuple[Row, ...]


def decide_rows(view: View, batch: int, prefill: int, static: bool) -> Plan:
    """Return the next call of the static or the continuous strategy; its memory is the list of rows."""
    rows, admit = fill(view, view.memory, batch, static)
    here = [request for request in map(live, rows) if request is not None]
    if not here:
        return Plan(memory=rows)  # copies alone are not run
    reject = refused([request for request in here if not request.decodes], view.max_model_len)
    if reject:
        return Plan(admit=admit, reject=reject, memory=rows)
    chunks: list[Chunk] = []
    copies = 0
    for place, row in enumerate(rows):
        if len(chunks) + copies == prefill:
            break
        if row is COPY:
            copies += 1
            rows = (*rows[:place], None, *rows[place + 1 :])
        elif (request := live(row)) and not request.decodes:
            chunks.append(Chunk(request, request.pending))
    if chunks or copies:
        return Plan(admit=admit, chunks=chunks, padding=copies, memory=rows)
    return Plan(admit=admit, decode=True, hold=FOREVER, memory=rows)


def affordable(plan: Plan, view: View) -> Plan:
    """Return the plan of a static batch with pages; nobody asks whether there are enough: the real loop dies then."""
    need = sum(view.pool.blocks(chunk.tokens) for chunk in plan.chunks) + (view.cohort.need() if plan.decode else 0)
    if need > view.pool.free:
        why = f"a static batch needs {need} blocks and {view.pool.free} are free; the serving loop is dead"
        raise Stuck(why, list(view.running), view.now)
    return plan


def live(row: Row) -> Optional[Request]:
    """Return the request of a row, if it is not over."""
    return row if isinstance(row, Request) and row.place != "done" else None


def fill(view: View, rows: Rows, batch: int, static: bool) -> tuple[Rows, list[Request]]:
    """Return the rows after new requests took theirs, and who they are."""
    taken = [live(row) is not None for row in rows]
    over = [row is GONE or (isinstance(row, Request) and row.place == "done") for row in rows]
    # A copy never counts as over: the continuous list is then refilled row by row instead of made again.
    if all(over) or (static and not any(taken)):
        fresh: list[Request] = list(islice(view.waiting, batch))
        if not fresh:
            return (), []
        copy = GONE if is_out_of_range(fresh[-1], view.max_model_len) else COPY
        return (*fresh, *([copy] * (batch - len(fresh)))), fresh
    if static or not view.waiting:
        return rows, []
    waiting = iter(view.waiting)
    filled = list(rows)
    admit = []
    for place, _row in enumerate(rows):
        if not taken[place]:
            request = next(waiting, None)
            if request is None:
                break
            filled[place] = request
            admit.append(request)
    return tuple(filled), admit


def is_out_of_range(request: Request, longest: Optional[int]) -> bool:
    """Whether a prompt and all it may write do not stay below the longest sequence."""
    return longest is not None and request.prompt + request.limit >= longest


def refused(prompts: Queue, longest: Optional[int]) -> list[Rejection]:
    """Return the prompts too long for the engine: all leave before anything runs, only the first is answered."""
    strangers = [request for request in prompts if is_out_of_range(request, longest)]
    reason = f"prompt + limit >= seq_length {longest}"
    return [Rejection(r, reason, "unanswered" if i else "refused") for i, r in enumerate(strangers)]
