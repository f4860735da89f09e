"""The requests of a run: created in parts when the engine reads them, stored as typed columns when they are done.

A request in flight is an object. One that is done is a row of numbers, from which metrics, requests.csv and the rows of
replicas are computed; what its client asked is in the trace. So the memory of a run grows with the requests in flight,
and by 136 bytes for each other one. Who needs an object gets a new one with the values of the row.

Some runs create all requests at the start, because they need them: requests that follow others or have several answers,
ranks in lock step, pools and changes in a cluster, clients that see the end late. Their results are the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Optional, Union, overload

import numpy as np
import numpy.typing as npt
from servesim.core import ClientRequest, Request
from servesim.engine.inbox import PART
from servesim.engine.server import Server
from servesim.traces.trace import has_field, values_of

from .build import copy_requests
from .packed_requests import (
    FIELDS,
    ROW,
    STATUSES,
    find_change,
    mark_client_timeouts,
    number_requests,
    pack_rows,
    restore,
)

Column = npt.NDArray[Any]
TYPES = np.dtype(list(FIELDS.items()))


class RunRequests(Sequence[Request]):
    """The requests of a run, in the order of the trace."""

    def __init__(self, asked: Sequence[ClientRequest], timeout: Optional[float] = None, watched: bool = False) -> None:
        """`timeout`: after which clients give up. `watched`: find what the policy changes of what clients ask."""
        self.asked = asked
        self.server: Optional[Server] = None  # of this policy
        self.change: Optional[tuple[Request, str]] = None  # the first request that it has changed, and the field
        self._timeout = timeout
        self._before: Optional[dict[int, tuple[Any, ...]]] = {} if watched else None
        self._objects: Optional[Sequence[Request]] = None  # if all were created at the start
        self._in_flight: list[Request] = []
        self._parts: Iterator[list[Request]] = self._create_parts()
        self._rows = bytearray(ROW.size * len(asked))
        self._codes: dict[str, int] = {}  # of outcomes and statuses
        self._table = np.frombuffer(self._rows, TYPES)
        self._reasons: dict[int, str] = {}  # why requests did not finish, by serial

    @classmethod
    def of(cls, requests: Sequence[Request]) -> RunRequests:
        """Return requests that have run, with their columns."""
        if isinstance(requests, RunRequests):
            return requests
        result = cls(requests)
        result._objects, result._parts = requests, iter(())
        pack_rows(result._rows, requests, range(len(requests)), result._codes)
        return result

    def stream(self) -> Iterator[Request]:
        """Return all requests in order of arrival. They are created when they are read."""
        return chain.from_iterable(self._parts)

    def _create_parts(self) -> Iterator[list[Request]]:
        enough = 2 * PART
        for start in range(0, len(self.asked), PART):
            if len(self._in_flight) >= enough:
                self._store([request for request in self._in_flight if request.status == "done"])
                self._in_flight = [request for request in self._in_flight if request.status != "done"]
                enough = 2 * (len(self._in_flight) + PART)  # a long queue is not searched for every part
            part = copy_requests(self.asked[start : start + PART])
            number_requests(part, start)
            if self._before is not None:
                self._before.update({request.serial: request.client_fields() for request in part})
            self._in_flight += part
            yield part

    def finish(self) -> None:
        """Store the last requests, at the end of the run."""
        for _ in self._parts:  # requests that a stuck engine has not read
            pass
        self._store(self._in_flight)
        self._in_flight, self._parts = [], iter(())

    def _store(self, requests: Sequence[Request]) -> None:
        if self._before is not None and self.server is not None:
            before = [self._before.pop(request.serial) for request in requests]
            change = find_change(self.server, before, requests)
            if change and (self.change is None or change[0].serial < self.change[0].serial):
                self.change = change
        if self._timeout is not None:
            mark_client_timeouts(requests, self._timeout)
        pack_rows(self._rows, requests, [request.serial for request in requests], self._codes)
        self._reasons.update({request.serial: request.reason for request in requests if request.reason is not None})

    def __len__(self) -> int:
        return len(self.asked)

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self[start : start + PART] for start in range(0, len(self), PART))

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...

    def __getitem__(self, index: Union[int, slice]) -> Union[Request, Sequence[Request]]:
        if self._objects is not None:
            return self._objects[index]
        if not isinstance(index, slice):
            row = range(len(self))[index]
            return self[row : row + 1][0]
        codes, requests = list(self._codes), copy_requests(self.asked[index])
        for serial, request in zip(range(len(self))[index], requests):
            request.serial, request.reason = serial, self._reasons.get(serial)
            restore(request, ROW.unpack_from(self._rows, ROW.size * serial), codes)
        return requests

    def column(self, name: str) -> Column:
        """Return the values of FIELDS, or of a number that clients ask, such as `prompt`. They must not be changed."""
        return np.asarray(self._table[name] if name in FIELDS else values_of(self.asked, name))

    @property
    def generated(self) -> Column:
        """The tokens of all answers of each request."""
        if self._objects is None or not has_field(self._objects, "sampling"):
            return self.column("written")
        return np.array([request.generated for request in self._objects])

    def has_outcome(self, outcome: str) -> npt.NDArray[np.bool_]:
        """Return which requests have an outcome."""
        return np.asarray(self.column("outcome") == self._codes.get(outcome, -1))

    def outcomes(self, part: slice = slice(None)) -> list[Optional[str]]:
        """Return the outcomes of the requests."""
        names = [None if name in STATUSES else name for name in self._codes]
        return [names[code] for code in self.column("outcome")[part].tolist()]
