"""Change a trace: scale, slice, repeat, merge, jitter. Each function returns a new trace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

from servesim.core import BadInput, ClientRequest, Sampling
from servesim.core.limits import MAX_NUMBER, MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, MIN_NUMBER, is_number
from servesim.files.read import quote
from servesim.files.write import yaml_text

from .contents import CONVERSATION_NOTE, first_turn, next_id, next_turn, renamed, scaled
from .samplings import scaled_sampling
from .trace import Trace, copy_request, stream


def scale(trace: Trace, rate: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> Trace:
    """Return the trace with the rate, the prompt lengths and the output lengths multiplied by these factors.

    Think times inside sessions scale like gaps. Lengths stay at least 1 token; limits scale like outputs. The parts of
    a prompt scale like the whole: prompts with equal beginnings keep them.
    """
    for name, factor in (("rate", rate), ("prompt", prompt), ("output", output)):
        _require_positive(f"scale: {name}", factor)

    def scale_sampling(sampling: Optional[Sampling]) -> Optional[Sampling]:
        if sampling is None or output == 1.0:
            return sampling
        return scaled_sampling(sampling, lambda tokens: _scale_tokens(tokens, output))

    def scale_request(request: ClientRequest) -> ClientRequest:
        tokens, content = _scale_tokens(request.prompt, prompt), request.content
        return copy_request(
            request,
            arrival=request.arrival / rate,
            think_time=request.think_time / rate,
            prompt=tokens,
            output=_scale_tokens(request.output, output),
            limit=_scale_tokens(request.limit, output),
            content=content if content is None or prompt == 1.0 else scaled(content, prompt, tokens),
            sampling=scale_sampling(request.sampling),
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


def repeat(trace: Trace, times: int) -> Trace:
    """Return `times` copies in a row, one mean gap apart.

    Each copy has new sessions and new texts. So the copies share no prompts, and the reuse stays that of the trace.
    """
    if times < 1:
        raise BadInput(f"repeat: expected at least 1, got {times}")
    if times * len(trace) > MAX_REQUESTS:
        raise BadInput(f"repeat: expected at most {MAX_REQUESTS} requests, got {times} * {len(trace)}")
    gap = trace.span / (len(trace) - 1) if len(trace) > 1 else 0.0
    period = trace.span + gap
    ids = next_id(trace.requests)
    requests = [_rename_copy(request, k, k * period, k * ids) for k in range(times) for request in trace.requests]
    return replace(trace, requests=_renumber(requests))


def merge(traces: Sequence[Trace], source: Optional[str] = None) -> Trace:
    """Return the traces in parallel. Ids, sessions and texts of different traces stay distinct."""
    requests: list[ClientRequest] = []
    first_id = 0
    for k, trace in enumerate(traces):
        requests += [_rename_copy(request, k, 0.0, first_id) for request in trace.requests]
        first_id += next_id(trace.requests)
    requests.sort(key=lambda request: request.arrival)
    dropped: Counter[str] = Counter()
    for trace in traces:
        dropped.update(trace.dropped)
    notes = list(dict.fromkeys(note for trace in traces for note in trace.notes))
    name = source or " + ".join(trace.source for trace in traces)
    timed = all(trace.timed for trace in traces)
    return Trace(_renumber(requests), name, traces[0].format, dict(dropped), notes, timed)


def as_conversations(trace: Trace) -> Trace:
    """Return the trace with sessions as conversations: a prompt starts with the one before and its answer.

    A prompt that is too short for this has a text of its own. Requests with a content keep it.
    """
    last: dict[str, ClientRequest] = {}
    requests, short = [], 0
    for request in trace.requests:
        if request.session is not None and request.content is None:
            before = last.get(request.session)
            answer = None if before is None else min(before.output, before.limit)
            if before is None or before.content is None or answer is None:
                content = first_turn(request.id, request.prompt)
            else:
                content = next_turn(request.id, request.prompt, before.content, answer)
                short += len(content.names) == 1
            request = last[request.session] = copy_request(request, content=content)
        requests.append(request)
    if not last:
        raise BadInput(f"{trace.source}: conversations: expected requests with a session and without a content")
    cut = [f"{short} turns are too short for this: they have texts of their own"] if short else []
    return replace(trace, requests=requests, notes=[*trace.notes, CONVERSATION_NOTE, *cut])


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


def _rename_copy(request: ClientRequest, copy: int, shift: float, first_id: int) -> ClientRequest:
    """Return the request with id, predecessor, session and texts of one copy."""
    return copy_request(
        request,
        id=(copy, request.id),
        arrival=request.arrival + shift,
        follows=None if request.follows is None else (copy, request.follows),
        session=request.session if request.session is None or not copy else f"{request.session}#{copy}",
        content=None if request.content is None else renamed(request.content, copy, first_id),
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
