"""FastServe's policies: skip-join MLFQ, which needs no output lengths, and SRPT, which uses the output limits."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from typing import Any, NamedTuple

from servesim.core import (
    DECODE_PAST_FINISH,
    FOREVER,
    IDLE_PLAN,
    Chunk,
    Plan,
    Request,
    Traits,
    View,
    first_time_after,
    require_at_least,
)
from servesim.core.native import mypyc_attr

from .fastserve_common import BatchChange, FastServePolicy

ENGINE = "FastServe 187a274"
MIN_QUANTUM = 1e-9  # seconds


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SRPT(FastServePolicy):
    """Shortest remaining output first, chosen in every step. An ideal baseline: limits must equal output lengths."""

    @property
    def counts_decodes(self) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        engine = f"{ENGINE}, srpt; KV blocks of preempted requests handled as in mlfq"
        return Traits(engine, validated_against="not validated: written from the source code")

    def sort_key(self, request: Request) -> Any:
        return request.limit - request.written, super().sort_key(request)

    def decide(self, view: View) -> Plan:
        def key(request: Request) -> tuple[float, ...]:
            if request.status == "waiting":
                if self.is_overdue(request, view.now):
                    return -math.inf, 2, 0, request.arrival
                remaining, order_key = self.sort_key(request)
                return remaining, 2, order_key, request.arrival
            # A running request is preempted only by a shorter one.
            return request.limit - request.written, request.status == "swapped", 0, request.arrival

        def candidates() -> Iterator[Request]:
            waiting: Iterable[Request] = () if self.host_is_almost_full(view) else view.waiting
            return merge(sorted(view.swapped, key=key), waiting, key=key)

        if not (view.waiting or view.swapped) and view.decode_block_need <= view.pool.free:
            return DECODE_PAST_FINISH if view.decoding else IDLE_PLAN
        chunks = self.chunks_if_all_fit(view)
        if chunks:
            return Plan(chunks=chunks, decode=view.decoding > 0)
        return self.make_plan(view, self.choose_batch(view, candidates, key), key)[0]


class RunningSlice(NamedTuple):
    """A running request and its time slice."""

    until: float  # first time at which its slice is used up
    serial: int
    request: Request
    level: int
    start: float  # start of its slice, corrected for the time in which it was preempted


class PreemptedRequest(NamedTuple):
    """A preempted request. In a level, the most recently preempted one comes first."""

    level: int
    recency: float  # negated time of its preemption or promotion
    serial: int
    request: Request
    used: float  # used seconds of its slice


class MlfqState(NamedTuple):
    """Policy state. Requests that have never run are in waiting, sorted by the level that they join."""

    batch: tuple[RunningSlice, ...] = ()  # sorted by the end of the slice
    preempted: tuple[PreemptedRequest, ...] = ()  # sorted by level
    starved: tuple[Request, ...] = ()  # waiting requests that were promoted to the top level
    steps: int = 0  # model calls so far


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class MLFQ(FastServePolicy):
    """Skip-join MLFQ: a request that uses up its time slice moves down one level. Long prompts start lower."""

    base_quantum: float = 0.01  # time slice of the top level in seconds
    threshold: float = 2.0  # ratio of the time slices of two neighbouring levels
    use_skip_join: bool = True  # a request starts at the level whose slice covers its prefill, not at the top
    profiled_prefill: float = 0.0  # fixed seconds of a prefill, for use_skip_join
    profiled_prefill_token: float = 1e-4  # seconds per prompt token, for use_skip_join
    starvation_threshold: float = 3.0  # seconds without running until a request moves to the top level
    starvation_period: int = 1000  # steps between two checks for such requests

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "threshold", "starvation_period")
        require_at_least(self, 0, "profiled_prefill", "profiled_prefill_token", "starvation_threshold")
        if not self.base_quantum >= MIN_QUANTUM:
            raise ValueError(f"base_quantum: expected more than 0, at least {MIN_QUANTUM:g}, got {self.base_quantum!r}")

    @property
    def traits(self) -> Traits:
        return Traits(
            engine=f"{ENGINE}, mlfq and sj-mlfq", validated_against="not validated: written from the source code"
        )

    def initial_state(self) -> Any:
        return MlfqState()

    def advance_state(self, state: Any, steps: int) -> Any:
        return MlfqState(state.batch, state.preempted, state.starved, state.steps + steps)

    def sort_key(self, request: Request) -> Any:
        return self.first_level(request), super().sort_key(request)

    def first_level(self, request: Request) -> int:
        """Return the level of a new request: the first one whose slice covers its prefill."""
        if not self.use_skip_join:
            return 0
        slices = (self.profiled_prefill + self.profiled_prefill_token * request.prompt) / self.base_quantum
        if slices <= 1 or self.threshold == 1:
            return 0
        level = max(0, math.ceil(math.log(slices, self.threshold)) - 1)  # may be one too low because of rounding
        return level if self.threshold**level >= slices else level + 1

    def decide(self, view: View) -> Plan:
        state: MlfqState = view.state
        if any(preempted.request.status == "done" for preempted in state.preempted):  # the client disconnected
            state = state._replace(preempted=tuple(p for p in state.preempted if p.request.status != "done"))
        slices = self._update_slices(state.batch, view)
        if view.waiting or state.preempted or view.decode_block_need > view.pool.free:
            chunks = self.chunks_if_all_fit(view)
            if chunks:
                return self._admit_all(view, state, slices, chunks)
            return self._run_highest_levels(view, state, slices)
        if not slices:
            return Plan(state=MlfqState((), (), (), state.steps))
        state = MlfqState(slices, (), (), state.steps + 1)
        return Plan(decode=True, wake_at=slices[0].until, hold=FOREVER, state=state)

    def _admit_all(self, view: View, state: MlfqState, slices: tuple[RunningSlice, ...], chunks: list[Chunk]) -> Plan:
        """Return a plan that admits all waiting requests."""
        batch = list(slices)
        for chunk in chunks:
            level = 0 if chunk.request in state.starved else self.first_level(chunk.request)
            insort(batch, self.new_slice(chunk.request, level, view.now))
        state = MlfqState(tuple(batch), (), (), state.steps + 1)
        return Plan(chunks=chunks, decode=len(slices) > 0, wake_at=batch[0].until, state=state)

    def _run_highest_levels(self, view: View, state: MlfqState, slices: tuple[RunningSlice, ...]) -> Plan:
        """Return a plan that runs the highest levels. Inside a level, running requests come first."""
        ranking = Ranking(self, view, state, slices)
        change = self.choose_batch(view, ranking.candidates, ranking.key)
        plan, change = self.make_plan(view, change, ranking.key)
        batch, preempted = ranking.apply(change)
        starved = tuple(request for request in state.starved if request not in change.entering)
        if not batch:
            return plan._replace(state=MlfqState((), preempted, starved, state.steps))
        steps = state.steps + 1
        steps_to_check = -steps % self.starvation_period
        hold = min(plan.hold, max(0, steps_to_check - 1))
        if not steps_to_check:
            preempted, starved = self._promote_starved(view, change, preempted, starved)
        return plan._replace(wake_at=batch[0].until, hold=hold, state=MlfqState(batch, preempted, starved, steps))

    def _promote_starved(
        self, view: View, change: BatchChange, preempted: tuple[PreemptedRequest, ...], starved: tuple[Request, ...]
    ) -> tuple[tuple[PreemptedRequest, ...], tuple[Request, ...]]:
        """Move requests that have not run for starvation_threshold seconds to the top level.

        There, running requests come first, then preempted, then waiting ones.
        """
        latest = view.now - self.starvation_threshold
        promoted = [p._replace(level=0, recency=-view.now) if -p.recency <= latest else p for p in preempted]
        known = {*starved, *change.entering}
        newly_starved = tuple(r for r in view.waiting if r.arrival <= latest and r not in known)
        return tuple(sorted(promoted)), (*starved, *newly_starved)

    def _update_slices(self, batch: tuple[RunningSlice, ...], view: View) -> tuple[RunningSlice, ...]:
        """Return the last batch without finished requests. Requests with a used-up slice move down one level."""
        now = view.now
        if len(batch) != len(view.running):
            batch = tuple([running for running in batch if running.request.status == "running"])
        if not batch or batch[0].until > now:
            return batch
        used_up = 1
        while used_up < len(batch) and batch[used_up].until <= now:
            used_up += 1
        slices = list(batch[used_up:])
        for running in batch[:used_up]:
            insort(slices, self.new_slice(running.request, running.level + 1, now))
        return tuple(slices)

    def new_slice(self, request: Request, level: int, start: float) -> RunningSlice:
        """Return the time slice of a request at a level."""
        span = self.base_quantum * self.threshold**level
        until = start + span
        if not until - start > span:
            until = first_time_after(start, span)
        return RunningSlice(until, request.serial, request, level, start)


class Ranking:
    """The order of all requests in one decision."""

    def __init__(self, policy: MLFQ, view: View, state: MlfqState, slices: tuple[RunningSlice, ...]) -> None:
        self.policy = policy
        self.view = view
        self.batch = slices
        self.preempted = {preempted.request: preempted for preempted in state.preempted}
        self.starved = {request: index for index, request in enumerate(state.starved)}

    @cached_property
    def slices(self) -> dict[Request, RunningSlice]:
        """The time slices of the batch by request. Built only if a preemption is possible."""
        return {running.request: running for running in self.batch}

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the sort key: overdue requests first, then by level. In a level: running, preempted, starved, new."""
        running = self.slices.get(request)
        if running is not None:
            return running.level, 0, running.start, running.serial
        preempted = self.preempted.get(request)
        if preempted is not None:
            return preempted.level, 1, preempted.recency, preempted.serial
        if request in self.starved:
            return 0, 2, self.starved[request], 0
        if self.policy.is_overdue(request, self.view.now):
            return -1, 0, 0, request.arrival
        level, order_key = self.policy.sort_key(request)
        return level, 3, order_key, request.arrival

    def candidates(self) -> Iterator[Request]:
        """Return the requests that do not run, in order."""
        waiting: Iterable[Request] = ()
        if not self.policy.host_is_almost_full(self.view):
            waiting = self.view.waiting
            if self.starved:
                waiting = (*self.starved, *(request for request in waiting if request not in self.starved))
        return merge(self.preempted, waiting, key=self.key) if self.preempted else iter(waiting)

    def apply(self, change: BatchChange) -> tuple[tuple[RunningSlice, ...], tuple[PreemptedRequest, ...]]:
        """Return the batch and the preempted requests after a change."""
        now, policy = self.view.now, self.policy
        batch = list(self.batch)
        for request in change.leaving:
            running = self.slices[request]
            batch.remove(running)
            used = now - running.start
            self.preempted[request] = PreemptedRequest(running.level, -now, running.serial, request, used)
        for request in change.entering:
            preempted = self.preempted.pop(request, None)
            if preempted is not None:
                insort(batch, policy.new_slice(request, preempted.level, now - preempted.used))
            else:
                level = 0 if request in self.starved else policy.first_level(request)
                insort(batch, policy.new_slice(request, level, now))
        return tuple(batch), tuple(sorted(self.preempted.values()))
