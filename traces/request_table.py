"""The requests of a trace as columns. Numbers are in numpy arrays: a million requests take 24 MB, as objects 280 MB."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar, Union, overload

import numpy as np
from servesim.core import ClientRequest
from servesim.core.request import CLIENT_FIELDS

AnyRequest = TypeVar("AnyRequest", bound=ClientRequest)
Column = Any  # np.ndarray, range or list: np.ndarray is no Sequence for type checkers
DEFAULTS: Mapping[str, Any] = {  # a column that has only this value is not stored
    "limit": None, "priority": 0, "session": None, "prefix_hashes": (), "follows": None, "think_time": 0.0,
    "fails_at_token": None,
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

    def column(self, name: str) -> Column:
        """Return a column that is always stored. It must not be changed."""
        return self._columns[name]

    def has_column(self, name: str) -> bool:
        """Whether a request has another value of this field than the default."""
        return name in self._columns

    def _values(self) -> Iterator[Iterable[Any]]:
        """Return the values of the fields in the order of CLIENT_FIELDS, up to the last one that is stored."""
        count = 1 + max(CLIENT_FIELDS.index(name) for name in self._columns)
        for name in CLIENT_FIELDS[:count]:
            values = self._columns.get(name)
            if values is None:
                yield repeat(DEFAULTS[name], len(self))
            else:
                yield values.tolist() if isinstance(values, np.ndarray) else values


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
