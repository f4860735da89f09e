"""The simulated engine: SimPy's clock around the driver, a step taking what the cost model says.

While a plan holds, iterations are not decided one by one: the engine leaps over them in one event. A leap adds the
same durations in the same order as single steps would, so it gives the same instants to the last bit.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from typing import Any, Optional

import simpy

from .core import Shape, StepCost
from .driver import Driver
from .leap import likely, stride
from .step import Step

SHORT = 24  # iterations of a leap that are cheaper one by one
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


def shape_of(step: Step, padding: Padding, last_token_decodes: bool = False) -> Shape:
    """Return what a step's time depends on."""
    tokens = live = squares = cross = 0
    chunks, decoders, context = step.chunks, step.decoders, step.context
    if last_token_decodes:
        alone = [request for request, part, _ in chunks if part == 1 and request.pending == 1 and request._cached]
        chunks = [chunk for chunk in chunks if chunk.request not in alone]
        decoders += len(alone)
        context += sum(request._cached for request in alone)
    for request, part, _ in chunks:
        padded = padding.tokens(part) if padding.prefill else part
        tokens += padded
        live += part
        squares += part * part
        cross += part * request._cached
    rows, extra = len(chunks), step.plan.padding
    decode_rows = decoders
    if decoders:
        decode_rows = max(padding.rows(decoders) if padding.decode else 0, decoders + extra)
    elif extra:
        rows += extra
        tokens += extra * padding.tokens(max((part for _, part, _ in chunks), default=0))
    return Shape(rows, tokens, live, squares, cross, decode_rows, decoders, context, step.swapped)


class Engine:
    """Runs a driver to the end of its inbox on simulated time."""

    def __init__(
        self,
        driver: Driver,
        cost: StepCost,
        padding: Padding = NO_PADDING,
        leaps: bool = True,
        cold_start: tuple[float, float] = (0.0, 0.0),  # seconds the first prefill and the first decode take longer
    ) -> None:
        self.driver = driver
        self.cost = cost
        self.padding = padding
        self.leaps = leaps and not driver.observers
        self.now = 0.0  # exact; SimPy's own clock adds delays up and may be off by a rounding
        self.busy = 0.0  # seconds of model calls
        self.waste = [0, 0]  # padded tokens and rows that nobody asked for
        self.widest = Shape()  # the largest of everything that was asked for
        self._patient = driver.policy.max_wait is None
        self._cold = {kind: seconds for kind, seconds in zip(("prefill", "decode"), cold_start) if seconds}

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
                self.now = instant
                yield env.timeout(max(0.0, instant - env.now))
                continue
            if self.leaps and step.plan.hold and not step.chunks and not step.skipped:
                end = self._leap_on(step)
            else:
                end = self.now + self._seconds(step)
                self._end(step, end, 1, None)
            if env.peek() <= end:  # the clock is handed over when somebody else has something to do before
                yield env.timeout(max(0.0, end - env.now))

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
            driver.server.view.memory = driver.policy.leap(driver.server.view.memory, 1)
            driver.server.begin_again(step, end)

    def _seconds(self, step: Step) -> float:
        shape = shape_of(step, self.padding, self.driver.policy.last_token_decodes)
        self.waste[0] += shape.prefill_tokens - shape.prefill_live
        self.waste[1] += shape.decode_rows - shape.decode_live
        widest = self.widest
        wider = shape.prefill_tokens > widest.prefill_tokens or shape.prefill_rows > widest.prefill_rows
        if wider or shape.decode_rows:
            self.widest = Shape(*map(max, widest, shape))
        if shape.prefill_rows or shape.swapped:
            seconds = self.cost.seconds(shape)
        else:
            seconds = self.cost.decode(shape.decode_rows, shape.decode_live, shape.context)
        return seconds + (self._cold.pop("prefill" if shape.prefill_rows else "decode", 0.0) if self._cold else 0.0)

    def _leap(self, step: Step) -> tuple[int, float, float]:
        """Run the held plan until something happens; return iterations, and the ends of the first and the last."""
        driver, plan, live, context = self.driver, step.plan, step.decoders, step.context
        server, inbox, decode = driver.server, driver.inbox, self.cost.decode
        cohort, rows = server.cohort, live
        if self.padding.decode or plan.padding:
            rows = max(self.padding.rows(live), live + plan.padding)
        line = self.cost.line(rows, live)
        fixed, slope = line or (0.0, 0.0)
        now = first = self.now + (decode(rows, live, context) + (self._cold.pop("decode", 0.0) if self._cold else 0.0))
        ticks = 1
        limit: float = min(plan.hold + 1, cohort.first_end())
        if inbox.lobby or driver.settling:
            limit = self._limit(limit)
        horizon = inbox.next_arrival if self._patient and plan.wake is None else self._horizon(plan.wake)
        if limit > 1 and (now < horizon or inbox.lag > 1):
            phases, block, phase = cohort.phases, cohort.block, -cohort.ticks
            free = server.pool.free - plan.spare
            durations: list[float] = []
            while ticks < limit:
                if now >= horizon:
                    limit, horizon = self._arrivals(plan.wake, now, ticks, limit)
                    if ticks >= limit or now >= horizon:
                        break
                if ticks >= SHORT and line is not None:
                    count = likely(now, horizon, durations[-1], limit - ticks)
                    further, now, taken = stride(
                        line, live, context, now, count, horizon, free, phases, phase - ticks + 1
                    )
                    ran = len(further)
                    durations.extend(further.tolist())
                    free, context, ticks = free - taken, context + live * ran, ticks + ran
                    if ran < count and now < horizon:
                        break  # short of blocks
                    continue
                taken = phases[(phase - ticks) % block]
                if taken > free:
                    break
                free -= taken
                context += live
                duration = decode(rows, live, context) if line is None else fixed + slope * context
                durations.append(duration)
                now += duration
                ticks += 1
            server.pool.free = free + plan.spare
            server.gaps.extend(durations, live)
        self.waste[1] += (rows - live) * ticks
        if rows > self.widest.decode_rows or context > self.widest.context:
            self.widest = Shape(*map(max, self.widest, Shape(decode_rows=rows, decode_live=live, context=context)))
        return ticks, first, now

    def _limit(self, limit: float) -> float:
        """Return how many iterations can run before somebody is seen, or may come because of an end."""
        lobby = self.driver.inbox.lobby
        if self.driver.settling:
            return 1
        return min(limit, lobby[0][0] - self.driver.calls) if lobby else limit

    def _horizon(self, wake: Optional[float]) -> float:
        """Return the instant before which nobody arrives, wakes the policy or is promoted."""
        promotion = None if self._patient else self.driver.server.next_promotion()
        instants = (self.driver.inbox.next_arrival, wake, promotion)
        return min(instant for instant in instants if instant is not None)

    def _arrivals(self, wake: Optional[float], now: float, ticks: int, limit: float) -> tuple[float, float]:
        """Let those in who arrive during a leap; return how many iterations it may still have, and its horizon."""
        driver, inbox = self.driver, self.driver.inbox
        if inbox.lag == 1 or inbox.next_arrival > now:
            return limit, now
        inbox.receive(now, driver.calls + ticks)
        return min(limit, inbox.lobby[0][0] - driver.calls), self._horizon(wake)
