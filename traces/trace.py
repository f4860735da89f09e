"""A trace: requests in order of arrival, where they came from, and what had to be left out.

Lengths are tokens, times are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import le
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput, ClientRequest
from servesim.core.request import ASKED


@dataclass
class Trace:
    """Requests sorted by arrival, with unique ids."""

    requests: list[ClientRequest]
    source: str  # file or generator
    format: str  # key of FORMATS, or "synth"
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows left out
    notes: list[str] = field(default_factory=list)  # what a reader had to assume
    timed: bool = True  # False: the file holds lengths only, and all arrive at 0
    block: Optional[int] = None  # prompt tokens that one hash id of a prefix stands for

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0.0

    @property
    def arrivals(self) -> NDArray[np.float64]:
        """Arrival times as an array."""
        return np.fromiter((request.arrival for request in self.requests), np.float64, len(self.requests))

    @property
    def prompts(self) -> NDArray[np.int64]:
        """Prompt lengths as an array."""
        return np.fromiter((request.prompt for request in self.requests), np.int64, len(self.requests))

    @property
    def outputs(self) -> NDArray[np.int64]:
        """Output lengths as an array."""
        return np.fromiter((request.output for request in self.requests), np.int64, len(self.requests))

    def remarks(self) -> list[str]:
        """Return one line for all that the user should know."""
        total = len(self.requests) + sum(self.dropped.values())
        counts = [f"{self.source}: {n} of {total} rows left out: {why}" for why, n in sorted(self.dropped.items())]
        return counts + [f"{self.source}: {note}" for note in self.notes]


def copied(request: ClientRequest, **changes: Any) -> ClientRequest:
    """Return a request as it was before any engine saw it, with some fields changed."""
    if not changes:
        return ClientRequest(
            request.id, request.arrival, request.prompt, request.output, request.limit, request.priority,
            request.session, request.prefix, request.after, request.delay, request.fails,
        )  # fmt: skip
    given = {name: getattr(request, name) for name in ASKED}
    return ClientRequest(**{**given, **changes})


@dataclass
class Columns:
    """What a reader found, one list a field, all as long as `prompt`; None where the format has no such field."""

    prompt: list[int]
    output: list[int]
    arrival: Optional[list[Optional[float]]] = None  # None for one that waits for another's end
    id: Optional[list[Any]] = None
    limit: Optional[list[Optional[int]]] = None
    priority: Optional[list[int]] = None
    session: Optional[list[Optional[str]]] = None
    prefix: Optional[list[Sequence[int]]] = None
    after: Optional[list[Any]] = None
    delay: Optional[list[float]] = None
    fails: Optional[list[Optional[int]]] = None
    unusable: dict[int, str] = field(default_factory=dict)  # index -> why it cannot be served
    numbers: Sequence[int] = ()  # row in the file, for messages; counted from 1 where not given
    block: Optional[int] = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = self.numbers or range(1, len(self.prompt) + 1)


def assemble(columns: Columns, source: str, format: str, order: str = "sort", shift: bool = False) -> Trace:
    """Return the trace of what a reader found: unusable rows dropped, arrivals in order, ids unique.

    `order` is what to do with rows out of order: sort or refuse. `shift` makes the first arrival 0,
    which is also done where times are plainly of the calendar.
    """
    ids = list(range(len(columns.prompt))) if columns.id is None else columns.id
    _unique(ids, columns, source)
    requests = _requests(columns, ids, shift, source)
    late = _first_late(requests)
    if late is not None and order == "refuse":
        raise BadInput(
            f"{source}: row {columns.numbers[late]}: arrival {requests[late].arrival:g} s after one of "
            f"{requests[late - 1].arrival:g} s: expected rows in order (`sim trace convert --sort` sorts them)"
        )
    unusable = _unusable(columns)
    if unusable:
        requests = _without(requests, unusable)
    dropped = dict(Counter(unusable.values()))
    if not requests:
        lost = f": {', '.join(f'{n} x {why}' for why, n in dropped.items())}" if dropped else ""
        raise BadInput(f"{source}: row {columns.numbers[0] if ids else 1}: no request in it can be served{lost}")
    trace = Trace(requests, source, format, dropped, list(columns.notes), columns.arrival is not None, columns.block)
    if late is not None:
        _sort(trace)
    if not trace.timed:
        trace.notes.append("no arrival times in this format: all arrive at 0")
    if columns.prefix is not None and trace.block is None:
        trace.block = prefix_block(trace.requests)
    return trace


def _unusable(columns: Columns) -> dict[int, str]:
    """Return why rows cannot be served, by index."""
    unusable = dict(columns.unusable)
    for name, values in (("prompt", columns.prompt), ("output", columns.output)):
        if values and min(values) < 1:
            for i, value in enumerate(values):
                if value < 1:
                    unusable.setdefault(i, f"no {name} tokens")
    return unusable


CALENDAR = 1e8  # seconds: a trace that begins later than this counts from 1970


def _unique(ids: list[Any], columns: Columns, source: str) -> None:
    """Raise a BadInput at the second row with the same id."""
    if columns.id is None or len(set(ids)) == len(ids):
        return
    seen: set[Any] = set()
    for number, id in zip(columns.numbers, ids):
        if id in seen:
            raise BadInput(f"{source}: row {number}: id: expected one not used before, got {str(id)[:40]!r}")
        seen.add(id)


def _requests(columns: Columns, ids: list[Any], shift: bool, source: str) -> list[ClientRequest]:
    """Return one request a row, in file order; those that wait for another get the earliest arrival possible."""
    rows = len(ids)
    arrivals = _arrivals(columns, ids, source)
    first = min(arrivals, default=0.0)
    if shift or first > CALENDAR:
        arrivals = [arrival - first for arrival in arrivals]
    nothing = [None] * rows
    fields = (
        ids, arrivals, columns.prompt, columns.output, columns.limit or nothing, columns.priority or [0] * rows,
        columns.session or nothing, columns.prefix or [()] * rows, columns.after or nothing,
        columns.delay or [0.0] * rows, columns.fails or nothing,
    )  # fmt: skip
    return list(map(ClientRequest, *fields))


def _arrivals(columns: Columns, ids: list[Any], source: str) -> list[float]:
    """Return every arrival; one that waits for another's end cannot come before that one arrived, plus its delay."""
    given: Sequence[Optional[float]] = [0.0] * len(ids) if columns.arrival is None else columns.arrival
    if columns.after is None:
        return [0.0 if arrival is None else arrival for arrival in given]
    delays = columns.delay or [0.0] * len(ids)
    known: dict[Any, float] = {}
    arrivals = []
    for id, number, arrival, after, delay in zip(ids, columns.numbers, given, columns.after, delays):
        if after is not None and after not in known:
            raise BadInput(f"{source}: row {number}: after: expected the id of an earlier row, got {str(after)[:40]!r}")
        if arrival is None:
            arrival = known[after] + delay if after is not None else 0.0
        known[id] = arrival
        arrivals.append(arrival)
    return arrivals


def _without(requests: list[ClientRequest], unusable: dict[int, str]) -> list[ClientRequest]:
    """Return the others; one that waited for a dropped request waits for what that one waited for, delays added."""
    gone = {requests[i].id: requests[i] for i in unusable}
    kept = [request for i, request in enumerate(requests) if i not in unusable]
    for request in kept:
        while request.after is not None and request.after in gone:
            lost = gone[request.after]
            request.after = lost.after
            request.delay = request.delay + lost.delay if lost.after is not None else 0.0
    return kept


def _first_late(requests: list[ClientRequest]) -> Optional[int]:
    """Return the index of the first request that arrives before the one in front of it."""
    arrivals = [request.arrival for request in requests]
    if all(map(le, arrivals, arrivals[1:])):
        return None
    return next(i for i in range(1, len(arrivals)) if arrivals[i] < arrivals[i - 1])


def _sort(trace: Trace) -> None:
    """Put the requests in order of arrival; no request may come before the one whose end it waits for."""
    trace.requests.sort(key=lambda request: request.arrival)
    trace.notes.append("rows were not in order of arrival: sorted")
    seen: set[Any] = set()
    for request in trace.requests:
        if request.after is not None and request.after not in seen:
            raise BadInput(
                f"{trace.source}: request {request.id!r} arrives before {request.after!r}, whose end it waits for"
            )
        seen.add(request.id)


BLOCKS = (512, 16, 64, 128, 256, 32, 1024, 1)  # tokens a hash id may stand for, the usual ones first


def prefix_block(requests: Iterable[ClientRequest]) -> Optional[int]:
    """Return the tokens a hash id stands for, if one usual size explains every request's count of ids."""
    marked = [request for request in requests if request.prefix]
    for block in BLOCKS if marked else ():
        if all(-(-request.prompt // block) == len(request.prefix) for request in marked):
            return block
    return None
