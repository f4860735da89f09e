"""The numbers of every request after a run: its row in requests.csv, and its seconds in each state.

They are computed from the columns of RunRequests. Statistics over requests are in metrics.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from servesim.core import Request
from servesim.traces.trace import has_field, values_of

from .run_requests import RunRequests

Array = npt.NDArray[np.float64]
PART = 1 << 13  # requests whose rows are made at once
RECORDED = (
    "id", "arrival", "first_token", "finish", "prompt", "output", "priority", "session", "preemptions",
    "cached_tokens", "queued", "prefill", "stalled", "decoding", "swapped", "front_end", "outcome",
)  # fmt: skip
COLUMNS = (*RECORDED, "ttft", "tpot", "e2el")  # the latencies follow from the others
STATES = ("front_end", "queued", "prefill", "stalled", "decoding", "swapped")


def request_rows(requests: Sequence[Request]) -> Iterator[tuple[Any, ...]]:
    """Return the rows of requests in requests.csv, in the order of COLUMNS."""
    table = RunRequests.of(requests)
    return chain.from_iterable(zip(*request_columns(table, part)) for part in parts_of(table))


def parts_of(table: RunRequests) -> Iterator[slice]:
    """Return the parts of the requests whose rows are made at once."""
    return (slice(start, start + PART) for start in range(0, len(table), PART))


def request_columns(table: RunRequests, part: slice) -> list[Sequence[Any]]:
    """Return the columns of a part of requests.csv, in the order of COLUMNS."""
    sent, first, end, written, preemptions, cached = (
        table.column(name)[part]
        for name in ("sent", "first_token", "client_end", "written", "preemptions", "cached_tokens")
    )
    front_end, queued, prefill, stalled, decoding, swapped = seconds_in_states(table, part)
    finished = table.finished[part]
    ttft, e2el = np.where(finished, first - sent, np.nan), np.where(finished, end - sent, np.nan)
    ttft, e2el = np.where(np.isnan(e2el), np.nan, ttft), np.where(np.isnan(ttft), np.nan, e2el)
    tpot = np.where(written > 1, (e2el - ttft) / np.maximum(written - 1, 1), np.nan)
    asked = table.asked[part]
    id, prompt, priority, session = (values_of(asked, name) for name in ("id", "prompt", "priority", "session"))
    return [
        plain(id), sent.tolist(), _times(first), _times(end), plain(prompt), written.tolist(), plain(priority),
        plain(session), preemptions.tolist(), cached.tolist(), queued.tolist(), prefill.tolist(), stalled.tolist(),
        decoding.tolist(), swapped.tolist(), front_end.tolist(), table.outcomes(part), _times(ttft), _times(tpot),
        _times(e2el),
    ]  # fmt: skip


def plain(values: Any) -> list[Any]:
    """Return the values of a column as objects of Python."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _times(values: Array) -> list[Any]:
    """Return numbers, with None for NaN."""
    numbers: list[Any] = values.tolist()
    for row in np.flatnonzero(np.isnan(values)).tolist():
        numbers[row] = None
    return numbers


def seconds_in_states(table: RunRequests, part: slice = slice(None)) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return the seconds of the requests in each state, in the order of STATES."""
    sent, start, finish, client_end, queued, prefilling, decoding, swapped, since = (
        table.column(name)[part]
        for name in ("sent", "visible_at", "finish", "client_end", "queued", "prefilling", "decoding", "swapped",
                     "state_since")
    )  # fmt: skip
    unfinished = np.isnan(finish)
    last, end = np.where(unfinished, since, finish), np.where(unfinished, start, finish)
    start = np.minimum(start, last)  # a client may give up before a server sees its request
    stalled = last - start - queued - prefilling - decoding - swapped  # in the batch, but not part of the step
    front_end = start - sent
    # otherwise the client has given up, and the server went on
    front_end = np.where(client_end > end, front_end + (client_end - end), front_end)
    return front_end, queued, prefilling, np.where(stalled > 0, stalled, 0.0), decoding, swapped


def total_seconds(table: RunRequests, chosen: npt.NDArray[Any]) -> dict[str, float]:
    """Return the seconds of some requests in each state, added in order."""
    return {state: sum_in_order(seconds[chosen]) for state, seconds in zip(STATES, seconds_in_states(table))}


def sum_in_order(values: Array) -> float:
    """Return the sum of numbers that are added one after another; np.sum has another order, and so other bits."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def group_requests(table: RunRequests, field: str, rows: npt.NDArray[np.int64], maximum: int) -> dict[Any, list[int]]:
    """Return the rows by `priority` or `session`; nothing if there is one value, or if there are too many."""
    if not has_field(table.asked, field):
        return {}
    all_values = plain(values_of(table.asked, field))
    values = [all_values[row] for row in rows.tolist()]
    ordered = sorted(set(values) - {None}, key=lambda value: (type(value).__name__, value))  # numbers or texts
    groups: dict[Any, list[int]] = {value: [] for value in ordered}
    if not 1 < len(groups) <= maximum:
        return {}
    for value, row in zip(values, rows.tolist()):
        if value is not None:
            groups[value].append(row)
    return groups
