"""Change a trace: scale, slice, repeat, merge, jitter. Each function returns a new trace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

from servesim.core import BadInput, ClientRequest
from servesim.core.limits import MAX_NUMBER, MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, MIN_NUMBER, is_number
from servesim.files.read import quote
from servesim.files.write import yaml_text

from .trace import Trace, copy_request, stream


def scale(trace: Trace, rate: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> Trace:
    """Return the trace with the rate, the prompt lengths and the output lengths multiplied by these factors.

    Think times inside sessions scale like gaps. Lengths stay at least 1 token; limits scale like outputs. If prompts
    change, hash ids are dropped: they would no longer identify the prompt's blocks.
    """
    for name, factor in (("rate", rate), ("prompt", prompt), ("output", output)):
        _require_positive(f"scale: {name}", factor)

    def scale_request(request: ClientRequest) -> ClientRequest:
        return copy_request(
            request,
            arrival=request.arrival / rate,
            think_time=request.think_time / rate,
            prompt=_scale_tokens(request.prompt, prompt),
            output=_scale_tokens(request.output, output),
            limit=_scale_tokens(request.limit, output),
            prefix_hashes=request.prefix_hashes if prompt == 1.0 else (),
        )

    return replace(trace, requests=[scale_request(request) for request in trace.requests])


def set_rate(trace: Trace, rate: float) -> Trace:
    """Return the trace with its time scaled to a mean of `rate` requests per second."""
    _require_positive("rate", rate)
    if trace.span <= 0:
        problem = f"cannot be scaled to {rate:g} requests/s: all requests arrive at the same time"
        raise BadInput(f"{trace.source}: {problem}; {arrivals_advice(trace, rate)}")
    return scale(trace, rate=rate * trace.span / (len(trace) - 1))


def arrivals_advice(trace: Trace, rate: float) -> str:
    """Return what to write for a file whose requests all arrive at once, such as one of ShareGPT."""
    lengths = {"kind": "trace", "path": trace.source, "draw": "in-order"}
    workload = {"requests": len(trace), "arrivals": {"kind": "poisson", "rate": rate}, "lengths": lengths}
    text = yaml_text(workload, default_flow_style=True, width=10_000).strip()
    return f"to draw arrival times, replace the trace by `workload: {text}`"


def slice_time(trace: Trace, start: float = 0.0, end: float = math.inf) -> Trace:
    """Return the requests that arrive in [start, end), with times counted from `start`.

    A request that follows a dropped one starts at its arrival time.
    """
    if not 0 <= start < end:
        raise BadInput(f"slice: expected a start of 0 or more and an end after it, got {start:g} and {end:g}")
    selected = [request for request in trace.requests if start <= request.arrival < end]
    if not selected:
        raise BadInput(f"{trace.source}: no request arrives from {start:g} to {end:g} s")
    selected_ids = {request.id for request in selected}
    requests = []
    for request in selected:
        changes = {} if request.follows in selected_ids else NO_DEPENDENCY
        requests.append(copy_request(request, arrival=round(request.arrival - start, 9), **changes))
    return replace(trace, requests=requests)


NO_DEPENDENCY: dict[str, Any] = {"follows": None, "think_time": 0.0}  # follows no other request


def repeat(trace: Trace, times: int, new_prompts: bool = False) -> Trace:
    """Return `times` copies in a row, one mean gap apart. Each copy has new sessions.

    Hash ids stay the same: a prefix cache finds the prompts of earlier copies. With `new_prompts`, it does not.
    """
    if times < 1:
        raise BadInput(f"repeat: expected at least 1, got {times}")
    if times * len(trace) > MAX_REQUESTS:
        raise BadInput(f"repeat: expected at most {MAX_REQUESTS} requests, got {times} * {len(trace)}")
    gap = trace.span / (len(trace) - 1) if len(trace) > 1 else 0.0
    period = trace.span + gap
    requests = [_rename_copy(request, k, k * period) for k in range(times) for request in trace.requests]
    ids = _count_hash_ids(trace) if new_prompts else 0
    for number, request in enumerate(requests) if ids else ():
        request.prefix_hashes = tuple(id + number // len(trace) * ids for id in request.prefix_hashes)
    return replace(trace, requests=_renumber(requests))


def merge(traces: Sequence[Trace], source: Optional[str] = None) -> Trace:
    """Return the traces in parallel. Ids, sessions and hash ids of different traces stay distinct."""
    blocks = {trace.block for trace in traces if trace.block is not None}
    if len(blocks) > 1:
        raise BadInput(f"merge: expected hash ids of one block size, got {' and '.join(map(str, sorted(blocks)))}")
    requests, offset = [], 0
    for k, trace in enumerate(traces):
        for request in trace.requests:
            moved = _rename_copy(request, k, 0.0)
            moved.prefix_hashes = tuple(id + offset for id in request.prefix_hashes)
            requests.append(moved)
        offset += _count_hash_ids(trace)
    requests.sort(key=lambda request: request.arrival)
    dropped: Counter[str] = Counter()
    for trace in traces:
        dropped.update(trace.dropped)
    notes = list(dict.fromkeys(note for trace in traces for note in trace.notes))
    name = source or " + ".join(trace.source for trace in traces)
    timed = all(trace.timed for trace in traces)
    block = blocks.pop() if blocks else None
    return Trace(_renumber(requests), name, traces[0].format, dict(dropped), notes, timed, block)


def jitter(trace: Trace, seconds: float, seed: int = 0) -> Trace:
    """Return the trace with a random delay below `seconds` per arrival, to spread rounded time stamps."""
    _require_positive("jitter", seconds, MAX_SECONDS)
    shifts = (stream(seed, "jitter").random(len(trace)) * seconds).tolist()
    moved: dict[Any, float] = {}
    requests = []
    for request, shift in zip(trace.requests, shifts):
        arrival = request.arrival + shift
        if request.follows is not None:  # its arrival is the earliest possible one: keep it after its predecessor
            arrival = max(request.arrival, moved.get(request.follows, 0.0) + request.think_time)
        moved[request.id] = arrival
        requests.append(copy_request(request, arrival=arrival))
    requests.sort(key=lambda request: request.arrival)
    return replace(trace, requests=requests)


def _count_hash_ids(trace: Trace) -> int:
    """Return the smallest number that is larger than every hash id."""
    return 1 + max((max(request.prefix_hashes) for request in trace.requests if request.prefix_hashes), default=-1)


def _rename_copy(request: ClientRequest, copy: int, shift: float) -> ClientRequest:
    """Return the request with id, predecessor and session of one copy."""
    return copy_request(
        request,
        id=(copy, request.id),
        arrival=request.arrival + shift,
        follows=None if request.follows is None else (copy, request.follows),
        session=request.session if request.session is None or not copy else f"{request.session}#{copy}",
    )


def _renumber(requests: list[ClientRequest]) -> list[ClientRequest]:
    """Number the requests in order, and update the ids of their predecessors."""
    numbers = {request.id: number for number, request in enumerate(requests)}
    for request in requests:
        request.id = numbers[request.id]
        if request.follows is not None:
            request.follows = numbers[request.follows]
    return requests


def _scale_tokens(tokens: int, factor: float) -> int:
    return tokens if factor == 1.0 else min(MAX_TOKENS, max(1, round(tokens * factor)))


def _require_positive(name: str, value: float, maximum: float = MAX_NUMBER) -> None:
    if not is_number(value, MIN_NUMBER, maximum):
        expected = f"a number from {MIN_NUMBER:g} to {maximum:g}" if 0 < value < math.inf else "a number above 0"
        raise BadInput(f"{name}: expected {expected}, got {quote(value)}")
