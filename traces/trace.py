"""A trace: requests in order of arrival, their source, and the rows that were skipped.

Lengths are tokens, times are seconds. Readers and generators store requests as columns of numpy arrays (RequestTable):
a million requests take 24 MB, as objects 280 MB.
"""

from __future__ import annotations

import gc
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, repeat
from operator import le
from typing import Any, Optional, TypeVar, Union, overload

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput, ClientRequest, Sampling
from servesim.core.content import Content
from servesim.core.limits import MAX_TOKENS
from servesim.core.request import CLIENT_FIELDS

from .contents import ID_SIZES, contents_from_ids

AnyRequest = TypeVar("AnyRequest", bound=ClientRequest)
Column = Any  # np.ndarray, range or list: np.ndarray is no Sequence for type checkers
DEFAULTS: Mapping[str, Any] = {  # a column that has only this value is not stored
    "limit": None, "priority": 0, "session": None, "content": None, "follows": None, "think_time": 0.0,
    "fails_at_token": None, "sampling": None, "acceptance": None,
}  # fmt: skip


class RequestTable(Sequence[ClientRequest]):
    """Requests that are created when they are read. Changing such a request does not change the table."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """`columns`: fields of ClientRequest. `id`, `arrival`, `prompt` and `output` are necessary."""
        self._columns: dict[str, Column] = {name: pack(values) for name, values in columns.items()}

    def __len__(self) -> int:
        return len(self._columns["prompt"])

    def __iter__(self) -> Iterator[ClientRequest]:
        return map(ClientRequest, *self._values())

    @overload
    def __getitem__(self, index: int) -> ClientRequest: ...

    @overload
    def __getitem__(self, index: slice) -> RequestTable: ...

    def __getitem__(self, index: Union[int, slice]) -> Union[ClientRequest, RequestTable]:
        if isinstance(index, slice):
            return RequestTable({name: values[index] for name, values in self._columns.items()})
        row: dict[str, Any] = {name: values[index] for name, values in self._columns.items()}
        return ClientRequest(**{name: plain_value(value) for name, value in row.items()})

    def create(self, kind: Callable[..., AnyRequest]) -> list[AnyRequest]:
        """Return a new object of this class for every request."""
        return list(map(kind, *self._values()))

    def pick(self, rows: Sequence[int]) -> RequestTable:
        """Return these rows in this order."""
        return RequestTable(
            {
                name: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
                for name, values in self._columns.items()
            }
        )

    @property
    def names(self) -> Iterable[str]:
        """The stored columns: fields that have another value than the default."""
        return self._columns.keys()

    def column(self, name: str) -> Column:
        """Return a column that is always stored. It must not be changed."""
        return self._columns[name]

    def _values(self) -> Iterator[Iterable[Any]]:
        """Return the values of the fields in the order of CLIENT_FIELDS, up to the last one that is stored."""
        count = 1 + max(CLIENT_FIELDS.index(name) for name in self._columns)
        for name in CLIENT_FIELDS[:count]:
            values = self._columns.get(name)
            if values is None:
                yield repeat(DEFAULTS[name], len(self))
            else:
                yield values.tolist() if isinstance(values, np.ndarray) else values


def has_field(requests: Sequence[ClientRequest], name: str) -> bool:
    """Whether a request has another value of this field than the default. Requests of a table are not created."""
    if isinstance(requests, RequestTable):
        return name in requests.names
    return any(getattr(request, name) != DEFAULTS[name] for request in requests)


def values_of(requests: Sequence[ClientRequest], name: str) -> Column:
    """Return a field of all requests. Requests of a table are not created."""
    if not isinstance(requests, RequestTable):
        return [getattr(request, name) for request in requests]
    return requests.column(name) if name in requests.names else [DEFAULTS[name]] * len(requests)


def table_of(requests: Sequence[ClientRequest]) -> RequestTable:
    """Return requests as a table."""
    if isinstance(requests, RequestTable):
        return requests
    columns = dict(zip(CLIENT_FIELDS, zip(*(request.client_fields() for request in requests))))
    return RequestTable(
        {
            name: values
            for name, values in columns.items()
            if name not in DEFAULTS or any(value != DEFAULTS[name] for value in values)
        }
    )


def plain_value(value: Any) -> Any:
    """Return a number of numpy as a number of Python."""
    return value.item() if isinstance(value, np.generic) else value


def pack(values: Column) -> Column:
    """Return a column as an array if it has only floats or only integers, so that reading it gives the same values."""
    if isinstance(values, (np.ndarray, range)):
        return values
    kinds = set(map(type, values))
    if kinds == {float}:
        return np.array(values, dtype=np.float64)
    if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return np.array(values, dtype=np.int64)
    return list(values)


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the random generator of this seed and name. Changing the use of one name does not change the others."""
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(zlib.crc32(name.encode()),)))


@dataclass
class Trace:
    """Requests sorted by arrival, with unique ids."""

    requests: Sequence[ClientRequest]  # readers and generators give a RequestTable
    source: str  # file or generator
    format: str  # key of FORMATS, or "synth"
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> number of skipped rows
    notes: list[str] = field(default_factory=list)  # assumptions of the reader, for the user
    timed: bool = True  # False: the file holds lengths only; all requests arrive at 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0.0

    @property
    def is_sorted(self) -> bool:
        """Whether no request arrives before the one that is before it in the list."""
        return bool((np.diff(self.arrivals) >= 0).all())

    @property
    def arrivals(self) -> NDArray[np.float64]:
        """Arrival times as an array."""
        return np.array(values_of(self.requests, "arrival"), dtype=np.float64)

    @property
    def prompts(self) -> NDArray[np.int64]:
        """Prompt lengths as an array."""
        return np.array(values_of(self.requests, "prompt"), dtype=np.int64)

    @property
    def outputs(self) -> NDArray[np.int64]:
        """Output lengths as an array."""
        return np.array(values_of(self.requests, "output"), dtype=np.int64)

    @property
    def contents(self) -> list[Content]:
        """The contents of the prompts that have one."""
        if not has_field(self.requests, "content"):
            return []
        return [content for content in values_of(self.requests, "content") if content is not None]

    def remarks(self) -> list[str]:
        """Return one line per skip reason and note, for the user."""
        total = len(self.requests) + sum(self.dropped.values())
        counts = [f"{self.source}: {n} of {total} rows skipped: {why}" for why, n in sorted(self.dropped.items())]
        return counts + [f"{self.source}: {note}" for note in self.notes]


def copy_request(request: ClientRequest, **changes: Any) -> ClientRequest:
    """Return a copy of the client's fields of a request, with some of them changed."""
    if not changes:
        return ClientRequest(*request.client_fields())
    fields = dict(zip(CLIENT_FIELDS, request.client_fields()))
    return ClientRequest(**{**fields, **changes})


@dataclass
class Columns:
    """Result of a reader: one list per field, all as long as `prompt`; None if the format has no such field."""

    prompt: list[int]
    output: list[int]
    arrival: Optional[list[Optional[float]]] = None  # None: follows another request
    id: Optional[list[Any]] = None
    limit: Optional[list[Optional[int]]] = None
    priority: Optional[list[int]] = None
    session: Optional[list[Optional[str]]] = None
    content: Optional[list[Optional[Content]]] = None
    follows: Optional[list[Any]] = None
    think_time: Optional[list[float]] = None
    fails_at_token: Optional[list[Optional[int]]] = None
    sampling: Optional[list[Optional[Sampling]]] = None
    acceptance: Optional[list[Optional[float]]] = None
    unusable: dict[int, str] = field(default_factory=dict)  # index -> why it cannot be served
    numbers: Sequence[int] = ()  # row in the file, for messages; default: counted from 1
    hash_ids: Optional[list[Sequence[int]]] = None  # become contents; an empty list is no content
    id_sizes: Sequence[int] = ID_SIZES  # possible numbers of tokens per hash id
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = self.numbers or range(1, len(self.prompt) + 1)


def build_trace(columns: Columns, source: str, format: str, order: str = "sort", shift: bool = False) -> Trace:
    """Return the trace of these columns: unusable rows dropped, arrivals in order, ids unique.

    `order`: "sort" or "refuse" rows that are out of order. `shift`: count times from the first arrival;
    times since 1970 are always shifted.
    """
    _check_lengths(columns, source)
    ids = range(len(columns.prompt)) if columns.id is None else columns.id
    _check_unique(ids, columns, source)
    _read_hash_ids(columns, ids)
    arrivals = _arrivals(columns, ids, shift, source)
    out_of_order = _first_out_of_order(arrivals)
    if out_of_order is not None and order == "refuse":
        before, here = arrivals[out_of_order - 1], arrivals[out_of_order]
        raise BadInput(
            f"{source}: row {columns.numbers[out_of_order]}: arrival {here:g} s after a row with {before:g} s: "
            "expected rows in order of arrival (`sim trace convert` sorts them)"
        )
    unusable = _unusable(columns)
    dropped = dict(Counter(unusable.values()))
    if len(unusable) == len(ids):
        reasons = f": {', '.join(f'{n} x {why}' for why, n in dropped.items())}" if dropped else ""
        raise BadInput(f"{source}: row {columns.numbers[0] if ids else 1}: no request can be served{reasons}")
    requests = _make_table(columns, ids, arrivals, unusable)
    trace = Trace(requests, source, format, dropped, list(columns.notes), columns.arrival is not None)
    if out_of_order is not None:
        trace.requests = _sort(requests, source)
        trace.notes.append("rows were not in order of arrival: sorted")
    if not trace.timed:
        trace.notes.append("no arrival times in this format: all arrive at 0")
    return trace


def _check_lengths(columns: Columns, source: str) -> None:
    """Raise BadInput for a prompt or an output that is too long."""
    for name, values in (("prompt", columns.prompt), ("output", columns.output)):
        if values and max(values) > MAX_TOKENS:
            row = next(number for number, tokens in zip(columns.numbers, values) if tokens > MAX_TOKENS)
            raise BadInput(f"{source}: row {row}: {name}: expected at most {MAX_TOKENS} tokens, got {max(values)}")


def _read_hash_ids(columns: Columns, ids: Sequence[Any]) -> None:
    """Turn hash ids into contents, for the rows without other contents. Rows whose ids do not fit are unusable."""
    if columns.hash_ids is None:
        return
    contents, misfits = contents_from_ids(columns.prompt, columns.hash_ids, ids, columns.id_sizes)
    columns.content = [own or content for own, content in zip(columns.content or repeat(None), contents)]
    for row, reason in misfits.items():
        columns.unusable.setdefault(row, reason)


def _unusable(columns: Columns) -> dict[int, str]:
    """Return the reason for every row that cannot be served, by index."""
    unusable = dict(columns.unusable)
    for name, values in (("prompt", columns.prompt), ("output", columns.output)):
        if values and min(values) < 1:
            for i, value in enumerate(values):
                if value < 1:
                    unusable.setdefault(i, f"no {name} tokens")
    return unusable


MIN_UNIX_TIME_S = 1e8  # a first arrival above this is a time since 1970


def _check_unique(ids: Sequence[Any], columns: Columns, source: str) -> None:
    """Raise BadInput if two rows have the same id."""
    if columns.id is None or len(set(ids)) == len(ids):
        return
    known_ids: set[Any] = set()
    for number, id in zip(columns.numbers, ids):
        if id in known_ids:
            raise BadInput(f"{source}: row {number}: id: expected an unused id, got {str(id)[:40]!r}")
        known_ids.add(id)


def _arrivals(columns: Columns, ids: Sequence[Any], shift: bool, source: str) -> list[float]:
    """Return all arrivals; a follower gets its earliest possible one."""
    arrivals = _resolve_arrivals(columns, ids, source)
    first = min(arrivals, default=0.0)
    return [arrival - first for arrival in arrivals] if shift or first > MIN_UNIX_TIME_S else arrivals


def _make_table(
    columns: Columns, ids: Sequence[Any], arrivals: list[float], unusable: Mapping[int, str]
) -> RequestTable:
    """Return one request per usable row, in file order."""
    if columns.follows and unusable:
        _skip_predecessors(columns, ids, unusable)
    fields = {name: getattr(columns, name) for name in CLIENT_FIELDS} | {"id": ids, "arrival": arrivals}
    if columns.content is not None and not any(columns.content):
        fields["content"] = None
    if columns.sampling is not None and not any(columns.sampling):
        fields["sampling"] = None
    table = RequestTable({name: values for name, values in fields.items() if values is not None})
    return table.pick([row for row in range(len(ids)) if row not in unusable]) if unusable else table


def _resolve_arrivals(columns: Columns, ids: Sequence[Any], source: str) -> list[float]:
    """Return all arrivals. A follower arrives no earlier than its predecessor's arrival plus the think time."""
    stated: Sequence[Optional[float]] = [0.0] * len(ids) if columns.arrival is None else columns.arrival
    if columns.follows is None:
        return [0.0 if arrival is None else arrival for arrival in stated]
    think_times = columns.think_time or [0.0] * len(ids)
    known: dict[Any, float] = {}
    arrivals = []
    for id, number, arrival, follows, think_time in zip(ids, columns.numbers, stated, columns.follows, think_times):
        if follows is not None and follows not in known:
            raise BadInput(
                f"{source}: row {number}: follows: expected the id of an earlier row, got {str(follows)[:40]!r}"
            )
        if arrival is None:
            arrival = known[follows] + think_time if follows is not None else 0.0
        known[id] = arrival
        arrivals.append(arrival)
    return arrivals


def _skip_predecessors(columns: Columns, ids: Sequence[Any], unusable: Mapping[int, str]) -> None:
    """Let a follower of an unusable row follow that row's predecessor; think times add up."""
    assert columns.follows is not None
    follows, think_time = list(columns.follows), list(columns.think_time or [0.0] * len(ids))
    unusable_ids = {ids[row]: row for row in unusable}
    for row in range(len(ids)):
        while row not in unusable and follows[row] is not None and follows[row] in unusable_ids:
            parent = unusable_ids[follows[row]]
            follows[row] = follows[parent]
            think_time[row] = think_time[row] + think_time[parent] if follows[parent] is not None else 0.0
    columns.follows, columns.think_time = follows, think_time


def _first_out_of_order(arrivals: list[float]) -> Optional[int]:
    """Return the index of the first request that arrives before the previous one."""
    if all(map(le, arrivals, islice(arrivals, 1, None))):
        return None
    return next(i for i in range(1, len(arrivals)) if arrivals[i] < arrivals[i - 1])


def _sort(requests: RequestTable, source: str) -> RequestTable:
    """Return the requests sorted by arrival; raise BadInput if one arrives before the one it follows."""
    arrivals = [request.arrival for request in requests]
    requests = requests.pick(sorted(range(len(arrivals)), key=arrivals.__getitem__))
    known_ids: set[Any] = set()
    for request in requests:
        if request.follows is not None and request.follows not in known_ids:
            raise BadInput(f"{source}: request {request.id!r} arrives before {request.follows!r}, which it follows")
        known_ids.add(request.id)
    return requests


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Turn the garbage collector off: scanning all requests takes 10 % of a run, and runs create few cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
