"""The simulated engine: SimPy's clock around the driver, a step taking what the cost model says."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy
from servesim.core import Shape, StepCost

from .fast_forward import Leaps
from .loop import Driver
from .shape import NO_PADDING, Padding, shape_of
from .step import Step

Events = Generator[simpy.Event, Any, None]


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
        self.leaps = Leaps(driver, cost, padding) if leaps and not driver.observers else None
        self.now = 0.0  # exact; SimPy's own clock adds delays up and may be off by a rounding
        self.idle = 0.0  # seconds without a model call
        self.padded = [0, 0]  # prompt tokens and decode rows run that nobody asked for, beside leaps
        self._widest = Shape()
        self._steady = cost.steady
        self._longest = 0  # whole prompt by itself
        self._alone: dict[int, tuple[float, int]] = {}  # seconds and padding of a whole prompt by itself
        self._cold = {kind: seconds for kind, seconds in zip(("prefill", "decode"), cold_start) if seconds}

    @property
    def busy(self) -> float:
        """Return the seconds of model calls."""
        return self.now - self.idle

    @property
    def waste(self) -> tuple[int, int]:
        """Return the padded tokens and rows that nobody asked for."""
        return self.padded[0], self.padded[1] + (self.leaps.padded if self.leaps else 0)

    @property
    def widest(self) -> Shape:
        """Return the largest of everything that was asked for."""
        rows, context = (self.leaps.rows, self.leaps.context) if self.leaps else (0, 0)
        return Shape(*map(max, self._widest, Shape(decode_rows=rows, decode_live=rows, context=context)))

    def run(self) -> float:
        """Serve everything; return the instant at which the last call ended."""
        env = simpy.Environment()
        process = env.process(self._serve(env))
        env.run(process)
        return self.now

    def _serve(self, env: simpy.Environment) -> Events:
        driver, leaps = self.driver, self.leaps
        while True:
            now = self.now
            step = driver.begin(now)
            if step is None:
                instant = driver.next_event()
                if instant is None:
                    return
                self.idle += instant - now
                self.now = instant
                yield env.timeout(max(0.0, instant - env.now))
            elif step.hold and leaps:
                self.now = leaps.run(step, now, self._late("decode") if self._cold else 0.0)
            else:
                self.now = now = now + self._seconds(step)
                driver.end(step, now)

    def _seconds(self, step: Step) -> float:
        """Return a step's time; that of one whole prompt, the usual prefill, is looked up by its length."""
        chunks = step.chunks
        if len(chunks) == 1 and not step.decoders and not step.swapped and self._steady and not self._cold:
            request, tokens, _ = chunks[0]
            if not request._cached:
                seconds, padded = self._alone.get(tokens) or self._first_alone(tokens, step)
                self.padded[0] += padded
                return seconds
        shape = self._shape(step)
        if shape.prefill_rows or shape.swapped:
            seconds = self.cost.seconds(shape)
        else:
            seconds = self.cost.decode(shape.decode_rows, shape.decode_live, shape.context)
        self.padded[0] += shape.prefill_tokens - shape.prefill_live
        self.padded[1] += shape.decode_rows - shape.decode_live
        return seconds + self._late("prefill" if shape.prefill_rows else "decode") if self._cold else seconds

    def _first_alone(self, tokens: int, step: Step) -> tuple[float, int]:
        shape = shape_of(step, self.padding, self.driver.policy.last_token_decodes)
        if tokens > self._longest or step.plan.padding:  # a shorter prompt by itself is less in every way
            self._longest = max(tokens, self._longest)
            self._widen(shape)
        found = self.cost.seconds(shape), shape.prefill_tokens - shape.prefill_live
        if not step.plan.padding:
            self._alone[tokens] = found
        return found

    def _shape(self, step: Step) -> Shape:
        shape = shape_of(step, self.padding, self.driver.policy.last_token_decodes)
        self._widen(shape)
        return shape

    def _widen(self, shape: Shape) -> None:
        self._widest = Shape(*map(max, self._widest, shape))

    def _late(self, kind: str) -> float:
        """Return what the first call of a kind takes longer."""
        return self._cold.pop(kind, 0.0)
