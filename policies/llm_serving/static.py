"""The static and continuous strategies of llm-serving: a fixed batch of rows, padded with copies of requests."""

from __future__ import annotations

from itertools import islice
from typing import Optional, Union

from servesim.core import UNTIL_FINISH, Chunk, Plan, Queue, Rejection, Request, Stuck, View

PADDING_ROW = "copy"  # a padding row whose prefill has not run yet; it costs as much as that of a request
REJECTED_ROW = "gone"  # a padding row that copied a rejected request; it never runs
Row = Optional[Union[Request, str]]  # None: a padding row whose prefill has run
Rows = tuple[Row, ...]


def decide_rows(view: View, batch: int, prefill: int, static: bool) -> Plan:
    """Return the plan of the static or the continuous strategy. The policy state is the list of rows."""
    rows, admit = fill_rows(view, view.state, batch, static)
    requests = [request for request in map(live_request, rows) if request is not None]
    if not requests:
        return Plan(state=rows)  # padding rows alone do not run
    reject = reject_out_of_range([request for request in requests if not request.decodes], view.max_model_len)
    if reject:
        return Plan(admit=admit, reject=reject, state=rows)
    chunks: list[Chunk] = []
    padding = 0
    for index, row in enumerate(rows):
        if len(chunks) + padding == prefill:
            break
        if row is PADDING_ROW:
            padding += 1
            rows = (*rows[:index], None, *rows[index + 1 :])
        elif (request := live_request(row)) and not request.decodes:
            chunks.append(Chunk(request, request.pending))
    if chunks or padding:
        return Plan(admit=admit, chunks=chunks, padding_rows=padding, state=rows)
    return Plan(admit=admit, decode=True, hold=UNTIL_FINISH, state=rows)


def check_blocks(plan: Plan, view: View) -> Plan:
    """Return the plan of a static batch with PagedAttention. The real loop ends if blocks are missing: raise Stuck."""
    need = sum(view.pool.blocks_for(chunk.tokens) for chunk in plan.chunks)
    need += view.decode_block_need if plan.decode else 0
    if need > view.pool.free:
        why = f"a static batch needs {need} blocks, {view.pool.free} are free: llm-serving's serving loop ends"
        raise Stuck(why, list(view.running), view.now)
    return plan


def live_request(row: Row) -> Optional[Request]:
    """Return the request of a row, or None for padding and for a finished request."""
    return row if isinstance(row, Request) and row.status != "done" else None


def fill_rows(view: View, rows: Rows, batch: int, static: bool) -> tuple[Rows, list[Request]]:
    """Return the rows with newly admitted requests, and these requests."""
    is_live = [live_request(row) is not None for row in rows]
    ended = [row is REJECTED_ROW or (isinstance(row, Request) and row.status == "done") for row in rows]
    # A padding row never counts as ended, so the continuous strategy refills row by row and makes no new list.
    if all(ended) or (static and not any(is_live)):
        admitted: list[Request] = list(islice(view.waiting, batch))
        if not admitted:
            return (), []
        padding = REJECTED_ROW if is_out_of_range(admitted[-1], view.max_model_len) else PADDING_ROW
        return (*admitted, *([padding] * (batch - len(admitted)))), admitted
    if static or not view.waiting:
        return rows, []
    waiting = iter(view.waiting)
    filled = list(rows)
    admit = []
    for index in range(len(rows)):
        if not is_live[index]:
            request = next(waiting, None)
            if request is None:
                break
            filled[index] = request
            admit.append(request)
    return tuple(filled), admit


def is_out_of_range(request: Request, max_length: Optional[int]) -> bool:
    """Return whether prompt length + output limit reach the maximum sequence length."""
    return max_length is not None and request.prompt + request.limit >= max_length


def reject_out_of_range(prompts: Queue, max_length: Optional[int]) -> list[Rejection]:
    """Return the rejections of all out-of-range prompts. As in the real server, only the first client gets a reply."""
    oversized = [request for request in prompts if is_out_of_range(request, max_length)]
    reason = f"prompt + limit >= seq_length {max_length}"
    return [Rejection(r, reason, "unanswered" if i else "refused") for i, r in enumerate(oversized)]
