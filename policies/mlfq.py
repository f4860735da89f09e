"""FastServe's preemptive orders: skip-join MLFQ, which learns who is long, and SRPT, which knows."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from typing import Any, NamedTuple

from servesim.core import FOREVER, Chunk, Plan, Request, Traits, View, at_least, just_after

from .common import DECODE, REST
from .preemptive import Change, Preemptive

MIRRORS = "FastServe 187a274"


@dataclass(frozen=True)
class SRPT(Preemptive):
    """Shortest remaining answer first, picked anew every iteration; an upper bound, since limits must be true."""

    @property
    def counts_decodes(self) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        engine = f"{MIRRORS}, srpt; where caches go is its MLFQ's rule"
        return Traits(engine, validated_against="not proven: read only")

    def rank(self, request: Request) -> Any:
        return request.limit - request.written, super().rank(request)

    def decide(self, view: View) -> Plan:
        def key(request: Request) -> tuple[float, ...]:
            if request.place == "waiting":
                if self.overdue(request, view.now):
                    return -math.inf, 2, 0, request.arrival
                remaining, rank = self.rank(request)
                return remaining, 2, rank, request.arrival
            # Who runs gives way only to what is shorter.
            return request.limit - request.written, request.place == "swapped", 0, request.arrival

        def newcomers() -> Iterator[Request]:
            fresh: Iterable[Request] = () if self.prompts_wait(view) else view.waiting
            return merge(sorted(view.swapped, key=key), fresh, key=key)

        if not (view.waiting or view.swapped) and view.need <= view.pool.free:
            return DECODE if view.decoding else REST
        chunks = self.all_fit(view)
        if chunks:
            return Plan(chunks=chunks, decode=view.decoding > 0)
        return self.arrange(view, self.choose(view, newcomers, key), key)[0]


class Turn(NamedTuple):
    """A request of the batch, and its time slice."""

    until: float  # first instant at which its slice is over
    serial: int
    request: Request
    level: int
    since: float  # when its slice would have begun, had it run all the time


class Pause(NamedTuple):
    """A request that has run and sits out; who went last comes first in its level."""

    level: int
    recency: float  # minus the time it last ran
    serial: int
    request: Request
    used: float  # seconds of its slice


class Ladder(NamedTuple):
    """What the feedback queue remembers; who has never run is still in waiting, in order of the level it joins."""

    batch: tuple[Turn, ...] = ()  # by the end of their slices
    paused: tuple[Pause, ...] = ()  # by level
    starved: tuple[Request, ...] = ()  # waiting requests that were promoted to the top
    iterations: int = 0


@dataclass(frozen=True)
class MLFQ(Preemptive):
    """Skip-join multi-level feedback queue: who uses up a slice goes down a level, long prompts start further down."""

    base_quantum: float = 0.01  # seconds of the top level's slice
    threshold: float = 2.0  # how much longer the slice of each level below is
    use_skip_join: bool = True  # a request joins the level whose slice its prompt needs, instead of the top
    profiled_prefill: float = 0.0  # seconds that any prompt takes, by the profile
    profiled_prefill_token: float = 1e-4  # seconds that each of its tokens adds
    starvation_threshold: float = 3.0  # seconds without running after which a request goes back to the top
    starvation_period: int = 1000  # iterations between two looks for such requests

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "threshold", "starvation_period")
        at_least(self, 0, "profiled_prefill", "profiled_prefill_token", "starvation_threshold")
        if not self.base_quantum > 0:
            raise ValueError(f"base_quantum: expected more than 0, got {self.base_quantum!r}")

    @property
    def traits(self) -> Traits:
        return Traits(engine=f"{MIRRORS}, mlfq and sj-mlfq", validated_against="not proven: read only")

    def begin(self) -> Any:
        return Ladder()

    def leap(self, memory: Any, iterations: int) -> Any:
        return memory._replace(iterations=memory.iterations + iterations)

    def rank(self, request: Request) -> Any:
        return self.joins(request), super().rank(request)

    def joins(self, request: Request) -> int:
        """Return the level a new request joins: the first whose slice lasts for its prompt."""
        if not self.use_skip_join:
            return 0
        slices = (self.profiled_prefill + self.profiled_prefill_token * request.prompt) / self.base_quantum
        if slices <= 1 or self.threshold == 1:
            return 0
        level = max(0, math.ceil(math.log(slices, self.threshold)) - 1)  # one too low where the logarithm is off
        return level if self.threshold**level >= slices else level + 1

    def decide(self, view: View) -> Plan:
        ladder: Ladder = view.memory
        if any(pause.request.place == "done" for pause in ladder.paused):  # their clients went away
            ladder = ladder._replace(paused=tuple(p for p in ladder.paused if p.request.place != "done"))
        turns = self._slices(ladder.batch, view)
        if view.waiting or ladder.paused or view.need > view.pool.free:
            chunks = self.all_fit(view)
            return self._start(view, ladder, turns, chunks) if chunks else self._contend(view, ladder, turns)
        if not turns:
            return Plan(memory=Ladder((), (), (), ladder.iterations))
        memory = Ladder(turns, (), (), ladder.iterations + 1)
        return Plan(decode=True, wake=turns[0].until, hold=FOREVER, memory=memory)

    def _start(self, view: View, ladder: Ladder, turns: tuple[Turn, ...], chunks: list[Chunk]) -> Plan:
        """Let in all that wait."""
        batch = list(turns)
        for chunk in chunks:
            level = 0 if chunk.request in ladder.starved else self.joins(chunk.request)
            insort(batch, self.turn(chunk.request, level, view.now))
        memory = Ladder(tuple(batch), (), (), ladder.iterations + 1)
        return Plan(chunks=chunks, decode=len(turns) > 0, wake=batch[0].until, memory=memory)

    def _contend(self, view: View, ladder: Ladder, turns: tuple[Turn, ...]) -> Plan:
        """Let the highest levels run, those that ran before the others of their level."""
        standing = Standing(self, view, ladder, turns)
        change = self.choose(view, standing.newcomers, standing.key)
        plan, change = self.arrange(view, change, standing.key)
        batch, paused = standing.after(change)
        starved = tuple(request for request in ladder.starved if request not in change.entering)
        if not batch:
            return plan._replace(memory=Ladder((), paused, starved, ladder.iterations))
        iterations = ladder.iterations + 1
        left = -iterations % self.starvation_period  # further iterations until the next look
        hold = min(plan.hold, max(0, left - 1))
        if not left:
            paused, starved = self._promote(view, change, paused, starved)
        return plan._replace(wake=batch[0].until, hold=hold, memory=Ladder(batch, paused, starved, iterations))

    def _promote(
        self, view: View, change: Change, paused: tuple[Pause, ...], starved: tuple[Request, ...]
    ) -> tuple[tuple[Pause, ...], tuple[Request, ...]]:
        """Move to the front of the top level who has not run for too long."""
        since = view.now - self.starvation_threshold
        top = [pause._replace(level=0, recency=-view.now) if -pause.recency <= since else pause for pause in paused]
        known = {*starved, *change.entering}
        fresh = tuple(r for r in view.waiting if r.arrival <= since and r not in known)
        return tuple(sorted(top)), (*starved, *fresh)

    def _slices(self, batch: tuple[Turn, ...], view: View) -> tuple[Turn, ...]:
        """Return the batch of the last iteration: the finished gone, those at the end of a slice one level down."""
        now = view.now
        if len(batch) != len(view.running):
            batch = tuple([turn for turn in batch if turn.request.place == "running"])
        if not batch or batch[0].until > now:
            return batch
        over = 1
        while over < len(batch) and batch[over].until <= now:
            over += 1
        turns = list(batch[over:])
        for turn in batch[:over]:
            insort(turns, self.turn(turn.request, turn.level + 1, now))
        return tuple(turns)

    def turn(self, request: Request, level: int, since: float) -> Turn:
        """Return a request's place in the batch."""
        span = self.base_quantum * self.threshold**level
        until = since + span
        if not until - since > span:
            until = just_after(since, span)
        return Turn(until, request.serial, request, level, since)


class Standing:
    """Who stands where at one decision."""

    def __init__(self, policy: MLFQ, view: View, ladder: Ladder, turns: tuple[Turn, ...]) -> None:
        self.policy = policy
        self.view = view
        self.batch = turns
        self.paused = {pause.request: pause for pause in ladder.paused}
        self.starved = {request: place for place, request in enumerate(ladder.starved)}

    @cached_property
    def turns(self) -> dict[Request, Turn]:
        """The batch by request, made only if somebody may have to go."""
        return {turn.request: turn for turn in self.batch}

    def key(self, request: Request) -> tuple[float, ...]:
        """Return what the order is by: level, then who ran last, who ran before, who never ran."""
        turn = self.turns.get(request)
        if turn is not None:
            return turn.level, 0, turn.since, turn.serial
        pause = self.paused.get(request)
        if pause is not None:
            return pause.level, 1, pause.recency, pause.serial
        if request in self.starved:
            return 0, 2, self.starved[request], 0
        if self.policy.overdue(request, self.view.now):
            return -1, 0, 0, request.arrival
        level, rank = self.policy.rank(request)
        return level, 3, rank, request.arrival

    def newcomers(self) -> Iterator[Request]:
        """Return who does not run, in order."""
        fresh: Iterable[Request] = ()
        if not self.policy.prompts_wait(self.view):
            fresh = self.view.waiting
            if self.starved:
                fresh = (*self.starved, *(request for request in fresh if request not in self.starved))
        return merge(self.paused, fresh, key=self.key) if self.paused else iter(fresh)

    def after(self, change: Change) -> tuple[tuple[Turn, ...], tuple[Pause, ...]]:
        """Return batch and paused requests once somebody has left and somebody has entered."""
        now, policy = self.view.now, self.policy
        batch = list(self.batch)
        for request in change.leaving:
            turn = self.turns[request]
            batch.remove(turn)
            self.paused[request] = Pause(turn.level, -now, turn.serial, request, now - turn.since)
        for request in change.entering:
            pause = self.paused.pop(request, None)
            if pause is not None:
                insort(batch, policy.turn(request, pause.level, now - pause.used))
            else:
                level = 0 if request in self.starved else policy.joins(request)
                insort(batch, policy.turn(request, level, now))
        return tuple(batch), tuple(sorted(self.paused.values()))
