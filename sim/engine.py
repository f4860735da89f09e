"""The simulated engine: SimPy's clock around the driver, a step taking what the cost model says.

While a plan holds, iterations are not decided one by one: the engine leaps over them in one event. A leap adds the
same durations in the same order as single steps would, so it gives the same instants to the last bit.
"""

from __future__ import annotations

import gc
import math
from operator import gt
from typing import Any, Generator, Optional, Sequence

import simpy

from .core import Shape, StepCost
from .driver import Driver
from .step import Step

Events = Generator[simpy.Event, Any, None]


class Padding:
    """What a device runs beside what it was asked for: prompts padded to a gear, decodes to a batch gear."""

    def __init__(self, prefill: Sequence[int] = (), decode: Sequence[int] = ()) -> None:
        self.prefill = tuple(sorted(prefill))  # row lengths; a prompt takes the first one longer than itself
        self.decode = tuple(sorted(decode))  # batch sizes; a batch takes the first that holds it

    def tokens(self, tokens: int) -> int:
        """Return the padded length of a prompt part."""
        for gear in self.prefill:
            if gear > tokens:
                return gear
        return max(tokens, self.prefill[-1]) if self.prefill else tokens

    def rows(self, rows: int) -> int:
        """Return the padded number of decoding rows."""
        for gear in self.decode:
            if gear >= rows:
                return gear
        return rows


NO_PADDING = Padding()


def shape_of(step: Step, padding: Padding) -> Shape:
    """Return what a step's time depends on."""
    tokens = live = squares = cross = 0
    for request, part, _ in step.chunks:
        padded = padding.tokens(part) if padding.prefill else part
        tokens += padded
        live += part
        squares += part * part
        cross += part * request._cached
    rows, extra = len(step.chunks), step.plan.padding
    decode_rows = step.decoders
    if step.decoders:
        decode_rows = max(padding.rows(step.decoders) if padding.decode else 0, step.decoders + extra)
    elif extra:
        rows += extra
        tokens += extra * padding.tokens(max((part for _, part, _ in step.chunks), default=0))
    return Shape(rows, tokens, live, squares, cross, decode_rows, step.decoders, step.context, step.swapped)


class Engine:
    """Runs a driver to the end of its inbox on simulated time."""

    def __init__(
        self,
        driver: Driver,
        cost: StepCost,
        padding: Padding = NO_PADDING,
        leaps: bool = True,
        cold_start: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.driver = driver
        self.cost = cost
        self.padding = padding
        self.leaps = leaps and not driver.observers
        self.now = 0.0  # exact; SimPy's own clock adds delays up and may be off by a rounding
        self.busy = 0.0  # seconds of model calls
        self.waste = [0, 0]  # padded tokens and rows that nobody asked for
        self.widest = Shape()  # the largest of everything that was asked for
        # seconds that the first prefill (0) and the first decode (1) take longer
        self._cold = {kind: seconds for kind, seconds in enumerate(cold_start) if seconds}

    def run(self) -> float:
        """Serve everything; return the instant at which the last call ended."""
        env = simpy.Environment()
        process = env.process(self._serve(env))
        collecting = gc.isenabled()
        gc.disable()  # the loop makes no cycles, and scanning all requests again and again is a tenth of a run
        try:
            env.run(process)
        finally:
            if collecting:
                gc.enable()
        return self.now

    def _serve(self, env: simpy.Environment) -> Events:
        driver = self.driver
        while True:
            step = driver.begin(self.now)
            if step is None:
                instant = driver.next_event()
                if instant is None:
                    return
                yield env.timeout(max(0.0, instant - env.now))
                self.now = instant
                continue
            if self.leaps and step.plan.hold and not step.chunks and not step.skipped:
                end = self._leap_on(step)
            else:
                end = self.now + self._seconds(step)
                self._end(step, end, 1, None)
            delay = end - env.now
            yield env.timeout(delay if delay > 0.0 else 0.0)

    def _end(self, step: Step, end: float, ticks: int, first: Optional[float]) -> None:
        self.busy += end - self.now
        self.now = end
        self.driver.end(step, end, ticks, first)
        if ticks > 1:
            self.driver.server.view.memory = self.driver.policy.leap(self.driver.server.view.memory, ticks - 1)

    def _leap_on(self, step: Step) -> float:
        """Leap, and leap again from every end of a request that leaves the plan as it is; return the last instant."""
        driver = self.driver
        while True:
            ticks, first, end = self._leap(step)
            self._end(step, end, ticks, first)
            if not step.plan.lasts or not driver.goes_on(step.plan, end):
                return end
            driver.server.begin_again(step, end)

    def _seconds(self, step: Step) -> float:
        if step.decoders and not (step.chunks or step.swapped or step.plan.padding):
            return self._decode_seconds(step)
        shape = shape_of(step, self.padding)
        self.waste[0] += shape.prefill_tokens - shape.prefill_live
        self.waste[1] += shape.decode_rows - shape.decode_live
        widest = self.widest
        self.widest = Shape(*map(max, widest, shape)) if any(map(gt, shape, widest)) else widest
        return self.cost.seconds(shape) + (self._warm_up(0 if shape.prefill_rows else 1) if self._cold else 0.0)

    def _decode_seconds(self, step: Step) -> float:
        live, context = step.decoders, step.context
        rows = self.padding.rows(live) if self.padding.decode else live
        self.waste[1] += rows - live
        if rows > self.widest.decode_rows or context > self.widest.context:
            self.widest = self.widest._replace(
                decode_rows=max(rows, self.widest.decode_rows), context=max(context, self.widest.context)
            )
        return self.cost.decode(rows, live, context) + (self._warm_up(1) if self._cold else 0.0)

    def _warm_up(self, kind: int) -> float:
        return self._cold.pop(kind, 0.0)

    def _leap(self, step: Step) -> tuple[int, float, float]:
        """Run the held plan until something happens; return iterations, and the ends of the first and the last."""
        driver, plan = self.driver, step.plan
        server, inbox, calls = driver.server, driver.inbox, driver.calls
        cohort, live = server.cohort, step.decoders
        now = first = self.now + self._seconds(step)
        limit = min(plan.hold + 1, cohort.first_end())
        if inbox.lobby:
            limit = min(limit, inbox.lobby[0][0] - calls)
        if driver.settling:
            limit = 1
        wake = self._horizon(plan.wake)
        ticks, arrival = 1, inbox.next_arrival
        if ticks < limit and now < wake:
            rows = max(self.padding.rows(live), live + plan.padding)
            context, free = step.context + live, server.pool.free - plan.spare
            durations: list[float] = []
            decode, need = self.cost.decode, cohort.need
            while ticks < limit and now < wake:
                if now >= arrival:
                    if inbox.lag == 1:
                        break
                    inbox.receive(now, calls + ticks)
                    limit, arrival = min(limit, inbox.lobby[0][0] - calls), inbox.next_arrival
                    if ticks >= limit:
                        break
                taken = need(ticks)
                if taken > free:
                    break
                free -= taken
                duration = decode(rows, live, context)
                durations.append(duration)
                now += duration
                context += live
                ticks += 1
            server.pool.free = free + plan.spare
            self._book(durations, live, rows)
        return ticks, first, now

    def _horizon(self, wake: Optional[float]) -> float:
        wake = math.inf if wake is None else wake
        if self.driver.policy.max_wait is None:
            return wake
        promotion = self.driver.server.next_promotion()
        return wake if promotion is None else min(wake, promotion)

    def _book(self, durations: list[float], live: int, rows: int) -> None:
        gaps = self.driver.server.gaps
        gaps.seconds.extend(durations)
        gaps.seen.extend([live] * len(durations))
        self.waste[1] += (rows - live) * len(durations)
