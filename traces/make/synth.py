"""Generate a trace from the `workload` section of a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapreplace
from typing import Any, Optional, Union

import numpy as np
from servesim.core import BadInput
from servesim.core.limits import MAX_REQUESTS, MAX_SEED
from servesim.files.read import quote
from servesim.traces.contents import CONVERSATION_NOTE
from servesim.traces.edit import merge
from servesim.traces.trace import Columns, Trace, build_trace, stream

from .arrivals import Closed
from .texts import add_texts, previous_of, previous_turns
from .workload import AnyWorkload, ClosedRequests, ContestWorkload, Mix, Requests, StagedRequests, workload_from

AnyRequests = Union[Requests, StagedRequests, ClosedRequests]


def synthesise(workload: Mapping[str, Any], seed: int = 0) -> Trace:
    """Return the trace of a workload; the same seed gives the same trace."""
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise BadInput(f"seed: expected a whole number of at least 0, at most {MAX_SEED}, got {quote(seed)}")
    return _generate(workload_from(workload), seed)


def _generate(workload: AnyWorkload, seed: int) -> Trace:
    if isinstance(workload, ContestWorkload):
        from .contest import contest

        keys = workload.contest
        return contest(keys.X, keys.T, seed, keys.lengths, keys.send_overhead, keys.tokenizer)
    if isinstance(workload, Mix):
        seeds = stream(seed, "mix").integers(2**31, size=len(workload.mix)).tolist()
        return merge(
            [_generate(part, part_seed) for part, part_seed in zip(workload.mix, seeds)], source=f"workload seed={seed}"
        )
    return _generate_requests(workload, seed)


def _generate_requests(workload: AnyRequests, seed: int) -> Trace:
    process, sessions = workload.arrivals, workload.sessions
    turns: list[int] = []
    if workload.requests is None:
        assert workload.duration is not None
        times = process.within(workload.duration, seed)
        if sessions is not None:
            turns = sessions.draw_turns(len(times), seed)
    elif sessions is not None and not isinstance(process, Closed):
        turns = sessions.turns_of(workload.requests, seed)
        times = process.times(len(turns), seed)
    else:
        times = process.times(workload.requests, seed)
    count = sum(turns) or len(times)
    if not count:
        raise BadInput(f"workload.duration: no request arrives in {workload.duration:g} s; use a longer duration")
    if count > MAX_REQUESTS:
        raise BadInput(f"workload.sessions: expected at most {MAX_REQUESTS} requests, got {count}")
    columns = workload.lengths.pairs(count, seed)
    columns.arrival = list(times.tolist())
    if workload.limit is not None:
        columns.output = [min(output, workload.limit) for output in columns.output]
        columns.limit = [workload.limit] * count
    if isinstance(process, Closed):
        _close_loop(columns, process, count, seed, balanced=isinstance(workload, ClosedRequests))
    elif sessions is not None:
        sessions.order_turns(columns, times.tolist(), turns, seed)
    if workload.priorities is not None:
        columns.priority = _draw_priorities(workload.priorities, count, seed)
    _share_texts(columns, workload, count, seed)
    return build_trace(columns, f"workload seed={seed}", "synth")


def _close_loop(columns: Columns, process: Closed, count: int, seed: int, balanced: bool) -> None:
    """Give each request to a user, who sends it after the end of the last one."""
    users = min(process.users, count)
    user_of = balanced_users(columns.output, users) if balanced else [k % users for k in range(count)]
    columns.session = [f"user-{user}" for user in user_of]
    columns.follows = previous_of(user_of)
    columns.think_time = list(process.delays(count, seed).tolist())
    assert columns.arrival is not None
    columns.arrival[users:] = [None] * (count - users)


def _share_texts(columns: Columns, workload: AnyRequests, count: int, seed: int) -> None:
    """Add prefixes and earlier turns to the prompts."""
    prefixes, sessions = workload.prefixes, workload.sessions
    if prefixes is None and sessions is None:
        return
    before: Sequence[Optional[int]] = [None] * count
    if sessions is not None:
        before = columns.follows or before
        if isinstance(workload.arrivals, Closed):
            before = previous_turns(before, sessions.draw_turns(count, seed))
        columns.notes.append(CONVERSATION_NOTE)
    add_texts(columns, [None] * count if prefixes is None else prefixes.draw(count, seed), before)


def balanced_users(outputs: Sequence[int], users: int) -> list[int]:
    """Return the user of each request: the next request goes to the user with the fewest output tokens so far.

    All open requests decode at the same speed, so this is nearly the user whose request ends first. The number of open
    requests then stays constant until the last one is sent.
    """
    tokens = [(0, user) for user in range(users)]  # a heap: sorted lists are heaps
    chosen = []
    for output in outputs:
        total, user = tokens[0]
        chosen.append(user)
        heapreplace(tokens, (total + output, user))
    return chosen


def _draw_priorities(fractions: Mapping[int, float], count: int, seed: int) -> list[int]:
    levels, weights = list(fractions), np.array(list(fractions.values()))
    indices = stream(seed, "priorities").choice(len(levels), size=count, p=weights / weights.sum())
    return [levels[k] for k in indices]
