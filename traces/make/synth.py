"""Generate a trace from the `workload` section of a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapreplace
from typing import Any, Optional, Union

import numpy as np
from servesim.core import BadInput
from servesim.core.limits import MAX_SEED
from servesim.files.read import quote
from servesim.traces.edit import merge
from servesim.traces.trace import Trace, build_trace, stream

from .arrivals import Closed
from .contest import contest
from .workload import AnyWorkload, ClosedRequests, ContestWorkload, Mix, Requests, StagedRequests, workload_from


def synthesise(workload: Mapping[str, Any], seed: int = 0) -> Trace:
    """Return the trace of a workload; the same seed gives the same trace."""
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise BadInput(f"seed: expected a whole number of at least 0, at most {MAX_SEED}, got {quote(seed)}")
    return _generate(workload_from(workload), seed)


def _generate(workload: AnyWorkload, seed: int) -> Trace:
    if isinstance(workload, ContestWorkload):
        keys = workload.contest
        return contest(keys.X, keys.T, seed, keys.lengths, keys.send_overhead, keys.tokenizer)
    if isinstance(workload, Mix):
        seeds = stream(seed, "mix").integers(2**31, size=len(workload.mix)).tolist()
        return merge(
            [_generate(part, part_seed) for part, part_seed in zip(workload.mix, seeds)], source=f"workload seed={seed}"
        )
    return _generate_requests(workload, seed)


def _generate_requests(workload: Union[Requests, StagedRequests, ClosedRequests], seed: int) -> Trace:
    process = workload.arrivals
    if workload.requests is not None:
        times = process.times(workload.requests, seed)
    else:
        assert workload.duration is not None
        times = process.within(workload.duration, seed)
    count = len(times)
    if not count:
        raise BadInput(f"workload.duration: no request arrives in {workload.duration:g} s; use a longer duration")
    columns = workload.lengths.pairs(count, seed)
    columns.arrival = list(times.tolist())
    if workload.limit is not None:
        columns.output = [min(output, workload.limit) for output in columns.output]
        columns.limit = [workload.limit] * count
    if isinstance(process, Closed):
        users = min(process.users, count)
        balanced = isinstance(workload, ClosedRequests)
        user_of = balanced_users(columns.output, users) if balanced else [k % users for k in range(count)]
        columns.session = [f"user-{user}" for user in user_of]
        columns.follows = previous_requests(user_of)
        columns.think_time = list(process.delays(count, seed).tolist())
        columns.arrival[users:] = [None] * (count - users)
    if workload.priorities is not None:
        columns.priority = _draw_priorities(workload.priorities, count, seed)
    return build_trace(columns, f"workload seed={seed}", "synth")


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


def previous_requests(user_of: Sequence[int]) -> list[Optional[int]]:
    """Return the index of the request before each one of the same user; None for a user's first request."""
    last: dict[int, int] = {}
    after = []
    for k, user in enumerate(user_of):
        after.append(last.get(user))
        last[user] = k
    return after


def _draw_priorities(fractions: Mapping[int, float], count: int, seed: int) -> list[int]:
    levels, weights = list(fractions), np.array(list(fractions.values()))
    indices = stream(seed, "priorities").choice(len(levels), size=count, p=weights / weights.sum())
    return [levels[k] for k in indices]
