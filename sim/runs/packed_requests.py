"""What a run stores of its requests when they are done: their numbers, packed.

These functions read every request of a run, so they are compiled. The columns are in run_requests.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

from servesim.core import Request
from servesim.core.request import CLIENT_FIELDS
from servesim.core.sampling import restored_group
from servesim.engine.server import Server

STATUSES: Final = ("outside", "waiting", "running", "swapped")  # of requests without an outcome
# Names and types of the fields of a row, as in `struct`. A time that does not exist is NaN.
FIELDS: Final = {
    "sent": "d", "arrival": "d", "visible_at": "d", "scheduled": "d", "first_token": "d", "last_token": "d",
    "finish": "d", "client_end": "d", "queued": "d", "prefilling": "d", "decoding": "d", "swapped": "d",
    "state_since": "d", "written": "q", "preemptions": "q", "cached_tokens": "q", "generated": "q",
    "drafted": "q", "accepted": "q", "outcome": "q",
}  # fmt: skip
ROW: Final = Struct("".join(FIELDS.values()))


def split_done(requests: dict[int, Request]) -> tuple[dict[int, Request], dict[int, Request]]:
    """Return the requests that are done, and the others."""
    done: dict[int, Request] = {}
    others: dict[int, Request] = {}
    for place, request in requests.items():
        if request.status == "done":
            done[place] = request
        else:
            others[place] = request
    return done, others


def pack_rows(rows: bytearray, requests: dict[int, Request], codes: dict[str, int], reasons: dict[int, str]) -> None:
    """Write requests as rows at their places, and why they did not finish.

    `codes`: numbers of outcomes, and of statuses of requests without one. A new outcome or status gets the next number.
    """
    pack_into, size, nan = ROW.pack_into, ROW.size, math.nan
    finished = codes.setdefault("finished", len(codes))
    for place, r in requests.items():
        outcome = r.outcome
        pack_into(
            rows, size * place, r.sent, r.arrival, r.visible_at, nan if r.scheduled is None else r.scheduled,
            nan if r.first_token is None else r.first_token, nan if r.last_token is None else r.last_token,
            nan if r.finish is None else r.finish,
            nan if r.client_end is None else r.client_end, r.queued, r.prefilling, r.decoding, r.swapped,
            r.state_since, r.written, r.preemptions, r.cached_tokens, r.generated, r.drafted, r.accepted,
            finished if outcome == "finished" else codes.setdefault(outcome or r.status, len(codes)),
        )  # fmt: skip
        if r.reason is not None:
            reasons[place] = r.reason


def restore(request: Request, row: Sequence[Any], codes: Sequence[str]) -> None:
    """Give a new request the values of its row."""
    request.sent, request.arrival, request.visible_at = row[:3]
    times = [None if math.isnan(time) else time for time in row[3:8]]
    request.scheduled, request.first_token, request.last_token, request.finish, request.client_end = times
    request.queued, request.prefilling, request.decoding, request.swapped, request.state_since = row[8:13]
    request._written, request.preemptions, request.cached_tokens, generated = row[13:17]
    request.drafted, request.accepted, code = row[17:]
    if request.sampling is not None:
        request.sampling = restored_group(request.sampling.values, generated)
    if codes[code] in STATUSES:
        request.status = codes[code]
    else:
        request.status, request.outcome = "done", codes[code]


def number_requests(new: list[Request], first: int, requests: dict[int, Request]) -> None:
    """Set the serials of new requests in order, and add them to the requests by place."""
    place = first
    for request in new:
        request.serial = place
        requests[place] = request
        place += 1


def mark_client_timeouts(requests: Sequence[Request], after: float) -> None:
    """Mark the requests whose client gave up after this many seconds."""
    for request in requests:
        if (
            request.client_end is not None
            and request.outcome == "finished"
            and request.client_end - request.sent > after
        ):
            request.outcome = "lost"
            request.reason = f"the client gave up after {after:g} s"
            request.client_end = request.sent + after


def find_change(server: Server, before: Sequence[Request], requests: Sequence[Request]) -> str:
    """Return the field that no longer has the value of the client or of the server; empty if all have.

    `before`: the same requests as the client sent them.
    """
    arrival_is_send_time = server.rules.arrival_is_send_time
    for request, old in zip(requests, before):
        if request.client_fields() != old.client_fields():
            for name, asked, now in zip(CLIENT_FIELDS, old.client_fields(), request.client_fields()):
                if asked != now and (name != "arrival" or request.follows is None):  # a follower is sent later
                    return "sent" if name == "arrival" else name
        if request.status == "outside":
            continue
        if request.arrival != (request.sent if arrival_is_send_time else request.visible_at):
            return "arrival"
        most = server.limits.most_tokens(request)
        if (request.max_tokens, request.stop_at) != (most, min(request.output, most)):
            return "max_tokens" if request.max_tokens != most else "stop_at"
    return ""
