"""The numbers of every request after a run: its row in requests.csv, its times, and its seconds in each state.

These functions read every request of a run, so they are compiled. Statistics over requests are in metrics.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any, Optional

from servesim.core import Request
from servesim.core.request import CLIENT_FIELDS
from servesim.engine.server import Server

RECORDED = (
    "id", "arrival", "first_token", "finish", "prompt", "output", "priority", "session", "preemptions",
    "cached_tokens", "queued", "prefill", "stalled", "decoding", "swapped", "front_end", "outcome",
)  # fmt: skip
COLUMNS = (*RECORDED, "ttft", "tpot", "e2el")  # the latencies follow from the others
PART = 1 << 10  # requests whose numbers are packed at once
STATES = ("front_end", "queued", "prefill", "stalled", "decoding", "swapped")


def request_row(request: Request) -> tuple[Any, ...]:
    """Return the row of a request in requests.csv, in the order of COLUMNS."""
    front_end, queued, prefilling, stalled, decoding, swapped = seconds_in_states(request)
    ttft, tpot, e2el = latencies(request)  # compiled, this is faster than a star in the tuple
    return (
        request.id, request.sent, request.first_token, request.client_end, request.prompt, request.written,
        request.priority, request.session, request.preemptions, request.cached_tokens,
        queued, prefilling, stalled, decoding, swapped, front_end, request.outcome, ttft, tpot, e2el,
    )  # fmt: skip


def latencies(request: Request) -> tuple[Optional[float], Optional[float], Optional[float]]:
    """Return ttft, tpot and e2el of a finished request; one with a single token has no tpot, others have nothing."""
    if request.outcome != "finished" or request.first_token is None or request.client_end is None:
        return None, None, None
    ttft, e2el = request.first_token - request.sent, request.client_end - request.sent
    return ttft, (e2el - ttft) / (request.written - 1) if request.written > 1 else None, e2el


def seconds_in_states(request: Request) -> tuple[float, float, float, float, float, float]:
    """Return the seconds of a request in each state, in the order of STATES."""
    start = request.visible_at
    last = request.state_since if request.finish is None else request.finish
    end = start if request.finish is None else request.finish
    client_end = end if request.client_end is None else request.client_end
    queued, prefilling, decoding, swapped = request.queued, request.prefilling, request.decoding, request.swapped
    stalled = last - start - queued - prefilling - decoding - swapped  # in the batch, but not part of the step
    front_end = start - request.sent
    if client_end > end:  # otherwise the client has given up, and the server went on
        front_end += client_end - end
    return front_end, queued, prefilling, stalled if stalled > 0 else 0.0, decoding, swapped


def total_seconds(requests: Sequence[Request]) -> dict[str, float]:
    """Return the seconds of all requests in each state, added in order."""
    front_end = queued = prefilling = stalled = decoding = swapped = 0.0
    for request in requests:
        seconds = seconds_in_states(request)
        front_end += seconds[0]
        queued += seconds[1]
        prefilling += seconds[2]
        stalled += seconds[3]
        decoding += seconds[4]
        swapped += seconds[5]
    return dict(zip(STATES, (front_end, queued, prefilling, stalled, decoding, swapped)))


class Served:
    """Sums over the requests of one replica."""

    def __init__(self) -> None:
        self.finished = 0  # requests; the sums below but `preemptions` are of these
        self.tokens = 0  # generated
        self.ttft = 0.0  # seconds
        self.first_tokens = 0
        self.preemptions = 0


def served_totals(requests: Sequence[Request], replica_of: Mapping[Any, int], replicas: int) -> list[Served]:
    """Return the sums of each replica."""
    totals = [Served() for _ in range(replicas)]
    for request in requests:
        number = replica_of.get(request.id)
        if number is None:
            continue
        total = totals[number]
        total.preemptions += request.preemptions
        if request.outcome == "finished":
            total.finished += 1
            total.tokens += request.written
            if request.first_token is not None:
                total.first_tokens += 1
                total.ttft += request.first_token - request.sent
    return totals


def packed_numbers(requests: Sequence[Request]) -> tuple[bytes, bytes, bytes, bytes]:
    """Return sent times, client ends, times of first tokens and generated tokens as packed floats; NaN: there is none.

    In parts: a float of Python needs four times the memory. `struct` converts several times faster than numpy.
    """
    sent, ended, first, output = [], [], [], []
    for start in range(0, len(requests), PART):
        part = requests[start : start + PART]
        layout = f"{len(part)}d"
        sent.append(pack(layout, *[request.sent for request in part]))
        ended.append(pack(layout, *[math.nan if r.client_end is None else r.client_end for r in part]))
        first.append(pack(layout, *[math.nan if r.first_token is None else r.first_token for r in part]))
        output.append(pack(layout, *[request.written for request in part]))
    return b"".join(sent), b"".join(ended), b"".join(first), b"".join(output)


def extra_tokens(requests: Sequence[Request]) -> int:
    """Return the tokens of all answers of the requests, without those of their longest answers."""
    return sum([request.generated - request.written for request in requests if request.group is not None])


def group_requests(requests: Sequence[Request], field: str, maximum: int) -> dict[Any, list[Request]]:
    """Return the requests by `priority` or `session`; nothing if there is one value, or if there are too many."""
    values = [request.priority if field == "priority" else request.session for request in requests]
    groups: dict[Any, list[Request]] = {value: [] for value in sorted(set(values) - {None}, key=by_type)}
    if not 1 < len(groups) <= maximum:
        return {}
    for value, request in zip(values, requests):
        if value is not None:
            groups[value].append(request)
    return groups


def by_type(value: Any) -> tuple[str, Any]:
    """Return the sort key of values that are numbers or texts."""
    return type(value).__name__, value


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


def find_change(
    server: Server, before: Sequence[tuple[Any, ...]], requests: Sequence[Request]
) -> Optional[tuple[Request, str]]:
    """Return the first request, and its field, that no longer has the value of the client or of the server.

    `before`: the client fields of the requests when the client sent them.
    """
    arrival_is_send_time = server.rules.arrival_is_send_time
    for request, old_fields in zip(requests, before):
        if request.client_fields() != old_fields:
            for name, old, new in zip(CLIENT_FIELDS, old_fields, request.client_fields()):
                if old != new and (name != "arrival" or request.follows is None):  # a follower is sent later
                    return request, "sent" if name == "arrival" else name
        if request.status == "outside":
            continue
        if request.arrival != (request.sent if arrival_is_send_time else request.visible_at):
            return request, "arrival"
        most = server.limits.most_tokens(request)
        if (request.max_tokens, request.stop_at) != (most, min(request.output, most)):
            return request, "max_tokens" if request.max_tokens != most else "stop_at"
    return None
