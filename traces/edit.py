"""Change a trace: scale, slice, repeat, merge, jitter. Each returns a new one and leaves the old alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

from servesim.core import BadInput, ClientRequest

from .random_streams import stream
from .trace import Trace, copied


def scale(trace: Trace, rate: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> Trace:
    """Return the trace with `rate` times as many requests a second, prompts and outputs that much longer.

    Pauses inside sessions shrink with the gaps. Lengths stay at least 1; limits grow with outputs. Hash ids are
    dropped where prompts change: they would no longer name the prompt's blocks.
    """
    for name, factor in (("rate", rate), ("prompt", prompt), ("output", output)):
        _positive(f"scale: {name}", factor)

    def scaled(request: ClientRequest) -> ClientRequest:
        return copied(
            request,
            arrival=request.arrival / rate,
            delay=request.delay / rate,
            prompt=_times(request.prompt, prompt),
            output=_times(request.output, output),
            limit=_times(request.limit, output),
            prefix=request.prefix if prompt == 1.0 else (),
        )

    return replace(trace, requests=[scaled(request) for request in trace.requests])


def at_rate(trace: Trace, rate: float) -> Trace:
    """Return the trace stretched or squeezed to `rate` requests a second on average."""
    _positive("rate", rate)
    if trace.span <= 0:
        raise BadInput(f"{trace.source}: cannot be brought to {rate:g} requests/s: all of them arrive at once")
    return scale(trace, rate=rate * trace.span / (len(trace) - 1))


def cut(trace: Trace, start: float = 0.0, end: float = math.inf) -> Trace:
    """Return what arrives from `start` to before `end`, times counted from `start`; chains keep whole what is left."""
    if not 0 <= start < end:
        raise BadInput(f"slice: expected a start of 0 or more and an end after it, got {start:g} and {end:g}")
    inside = [request for request in trace.requests if start <= request.arrival < end]
    if not inside:
        raise BadInput(f"{trace.source}: no request arrives from {start:g} to {end:g} s")
    kept = {request.id for request in inside}
    requests = [
        copied(request, arrival=round(request.arrival - start, 9), **({} if request.after in kept else LOOSE))
        for request in inside
    ]
    return replace(trace, requests=requests)


LOOSE: dict[str, Any] = {"after": None, "delay": 0.0}  # waits for no other request


def repeat(trace: Trace, times: int) -> Trace:
    """Return the trace `times` times in a row, one mean gap between copies; sessions are new, hash ids the same."""
    if times < 1:
        raise BadInput(f"repeat: expected at least 1, got {times}")
    gap = trace.span / (len(trace) - 1) if len(trace) > 1 else 0.0
    turn = trace.span + gap
    requests = [_renamed(request, k, k * turn) for k in range(times) for request in trace.requests]
    return replace(trace, requests=_renumbered(requests))


def merge(traces: Sequence[Trace], source: Optional[str] = None) -> Trace:
    """Return several traces at the same time; ids, sessions and hash ids of different traces never meet."""
    blocks = {trace.block for trace in traces if trace.block is not None}
    if len(blocks) > 1:
        raise BadInput(f"merge: expected hash ids of one block size, got {' and '.join(map(str, sorted(blocks)))}")
    requests, offset = [], 0
    for k, trace in enumerate(traces):
        top = max((max(request.prefix) for request in trace.requests if request.prefix), default=-1)
        for request in trace.requests:
            moved = _renamed(request, k, 0.0)
            moved.prefix = tuple(id + offset for id in request.prefix)
            requests.append(moved)
        offset += top + 1
    requests.sort(key=lambda request: request.arrival)
    dropped: Counter[str] = Counter()
    for trace in traces:
        dropped.update(trace.dropped)
    notes = list(dict.fromkeys(note for trace in traces for note in trace.notes))
    name = source or " + ".join(trace.source for trace in traces)
    timed = all(trace.timed for trace in traces)
    block = blocks.pop() if blocks else None
    return Trace(_renumbered(requests), name, traces[0].format, dict(dropped), notes, timed, block)


def jitter(trace: Trace, seconds: float, seed: int = 0) -> Trace:
    """Return the trace with each arrival up to `seconds` later: stamps that were rounded down are spread."""
    _positive("jitter", seconds)
    later = (stream(seed, "jitter").random(len(trace)) * seconds).tolist()
    moved: dict[Any, float] = {}
    requests = []
    for request, shift in zip(trace.requests, later):
        arrival = request.arrival + shift
        if request.after is not None:  # its arrival is only the earliest possible: keep it behind the one it waits for
            arrival = max(request.arrival, moved.get(request.after, 0.0) + request.delay)
        moved[request.id] = arrival
        requests.append(copied(request, arrival=arrival))
    requests.sort(key=lambda request: request.arrival)
    return replace(trace, requests=requests)


def _renamed(request: ClientRequest, copy: int, shift: float) -> ClientRequest:
    """Return a request whose names belong to one copy."""
    return copied(
        request,
        id=(copy, request.id),
        arrival=request.arrival + shift,
        after=None if request.after is None else (copy, request.after),
        session=request.session if request.session is None or not copy else f"{request.session}#{copy}",
    )


def _renumbered(requests: list[ClientRequest]) -> list[ClientRequest]:
    """Number the requests in order, those they wait for with them."""
    numbers = {request.id: number for number, request in enumerate(requests)}
    for request in requests:
        request.id = numbers[request.id]
        if request.after is not None:
            request.after = numbers[request.after]
    return requests


def _times(tokens: int, factor: float) -> int:
    return tokens if factor == 1.0 else max(1, round(tokens * factor))


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise BadInput(f"{name}: expected a number above 0, got {value:g}")
