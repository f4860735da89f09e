"""The requests of a run: created when the engine reads them, stored as typed columns when they are done.

A request in flight is an object. One that is done is a row of numbers, from which metrics, requests.csv and the rows of
replicas are computed; what its client asked is in the trace. So the memory of a run grows with the requests in flight,
and by 160 bytes for each other one. Who needs an object gets a new one with the values of the row.

Some engines read all requests at the start (`create_all`), because requests follow others or have several answers, for
ranks in lock step, pools and changes in a cluster, and clients that see the end late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Optional, Union, overload

import numpy as np
import numpy.typing as npt
from servesim.core import ClientRequest, Request
from servesim.engine.clients import PART
from servesim.engine.rules import EngineRules
from servesim.engine.server import Server
from servesim.traces.trace import RequestTable, values_of

from .answers import Answers, join_answers, split, split_answers, with_answers
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
    split_done,
)

Column = npt.NDArray[Any]
TYPES = np.dtype(list(FIELDS.items()))


class RunRequests(Sequence[Request]):
    """The requests of a run, in the order of the trace."""

    def __init__(self, asked: Sequence[ClientRequest], timeout: Optional[float] = None) -> None:
        """`timeout`: after which clients give up."""
        self.asked = asked
        self.ran: Sequence[Request] = self  # by the engine: one per answer, if it runs these apart
        self.watched: Optional[Server] = None  # of a user's policy, which may change what clients ask
        self.change: Optional[tuple[int, Request, str]] = None  # the first request that it has changed, and the field
        self._timeout = timeout
        self._answers: Answers = {}
        self._in_flight: dict[int, Request] = {}  # by their place in the trace
        self._parts: Iterator[list[Request]] = self._create_parts()
        self._rows = bytearray(ROW.size * len(asked))
        self._codes: dict[str, int] = {}  # of outcomes and statuses
        self._table = np.frombuffer(self._rows, TYPES)
        self._reasons: dict[int, str] = {}  # why requests did not finish, by place

    @classmethod
    def holding(cls, requests: Sequence[Request], timeout: Optional[float] = None) -> RunRequests:
        """Return requests that were created before."""
        if isinstance(requests, RunRequests):
            return requests
        result = cls([ClientRequest(*request.client_fields()) for request in requests], timeout)
        result._in_flight, result._parts = dict(enumerate(requests)), iter(())
        return result

    @classmethod
    def of(cls, requests: Sequence[Request], timeout: Optional[float] = None) -> RunRequests:
        """Return requests that have run, with their columns."""
        result = cls.holding(requests, timeout)
        result.finish()
        return result

    def stream(self) -> Iterator[Request]:
        """Return all requests in order of arrival. They are created when they are read."""
        return chain.from_iterable(self._parts)

    def create_all(self, rules: EngineRules) -> Sequence[Request]:
        """Create all requests now. Return those that an engine with these rules gets."""
        requests = list(self.stream())
        self._answers = split_answers(requests, rules)
        if not self._answers:
            return requests
        self.ran = with_answers(requests, self._answers)
        return self.ran

    def _create_parts(self) -> Iterator[list[Request]]:
        enough = 2 * PART
        for start in range(0, len(self.asked), PART):
            if len(self._in_flight) >= enough:
                self._store_done()
                enough = 2 * (len(self._in_flight) + PART)  # a long queue is not searched for every part
            part = copy_requests(self.asked[start : start + PART])
            number_requests(part, start, self._in_flight)
            yield part

    def _store_done(self) -> None:  # a method, because a generator would keep the requests in its local names
        done, self._in_flight = split_done(self._in_flight)
        self._store(done)

    def finish(self) -> None:
        """Store the last requests, at the end of the run."""
        for _ in self._parts:  # requests that a stuck engine has not read
            pass
        self._store(self._in_flight)
        self._in_flight, self._parts, self._answers, self.watched = {}, iter(()), {}, None

    def _store(self, requests: dict[int, Request]) -> None:
        if self.watched is not None:
            self._watch(self.watched, requests)
        for request in requests.values() if self._answers else ():
            if request.id in self._answers:
                join_answers(request, self._answers[request.id])
        if self._timeout is not None:
            mark_client_timeouts(list(requests.values()), self._timeout)
        pack_rows(self._rows, requests, self._codes, self._reasons)

    def _watch(self, server: Server, requests: Mapping[int, Request]) -> None:
        """Find what the policy has changed of requests, or of their answers."""
        places, asked = list(requests), self.asked
        before = asked.pick(places) if isinstance(asked, RequestTable) else [asked[place] for place in places]
        for place, old in zip(places, copy_requests(before)):
            request = requests[place]
            answers = self._answers.get(request.id)
            name = find_change(server, [old] if answers is None else split(old), answers or [request])
            if name and (self.change is None or place < self.change[0]):
                self.change = place, request, name

    def __len__(self) -> int:
        return len(self.asked)

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self[start : start + PART] for start in range(0, len(self), PART))

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...

    def __getitem__(self, index: Union[int, slice]) -> Union[Request, Sequence[Request]]:
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
    def finished(self) -> npt.NDArray[np.bool_]:
        """Which requests have finished."""
        return np.asarray(self.column("outcome") == self._codes.get("finished", -1))

    def outcomes(self, part: slice = slice(None)) -> list[Optional[str]]:
        """Return the outcomes of the requests."""
        names = np.array([None if name in STATUSES else name for name in self._codes], dtype=object)
        outcomes: list[Optional[str]] = names[self.column("outcome")[part]].tolist()
        return outcomes
