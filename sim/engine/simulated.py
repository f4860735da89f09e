"""The simulated clock: SimPy's time, a step takes what the cost model says, and held steps are fast-forwarded."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, Callable, Optional

import simpy
from servesim.core import Shape, StepCost, Traits

from .clocks import Clock
from .fast_forward import FastForward
from .loop import Loop
from .shape import NO_PADDING, Padding, shape_of
from .step import Step


class SimulatedClock(Clock):
    """SimPy's clock; its own `now` adds delays up and may be off by a rounding, so the loop keeps the exact time."""

    def __init__(
        self,
        cost: StepCost,
        padding: Padding = NO_PADDING,
        leaps: bool = True,
        cold_start: tuple[float, float] = (0.0, 0.0),  # seconds the first prefill and the first decode take longer
    ) -> None:
        self.cost = cost
        self.padding = padding
        self.leaps = leaps
        self.forward: Optional[FastForward] = None
        self.idle = 0.0  # seconds without a model call
        self._padded = [0, 0]  # padding tokens of prompts and padding rows of decodes, fast-forward not counted
        self._largest = Shape()
        self._steady = cost.steady
        self._longest = 0  # longest whole prompt that ran by itself
        self._single: dict[int, tuple[float, int]] = {}  # seconds and padding of a whole prompt by itself
        self._cold = {kind: seconds for kind, seconds in zip(("prefill", "decode"), cold_start) if seconds}

    def fast_forward(self, loop: Loop) -> Optional[FastForward]:
        """Return what runs held steps as one event; observers want every step by itself."""
        if self.leaps and not loop.observers:
            self.forward = FastForward(loop, self.cost, self.padding, self.cold_start)
        return self.forward

    @property
    def padded(self) -> tuple[int, int]:
        """The padding tokens of prompts and the padding rows of decodes that ran."""
        return self._padded[0], self._padded[1] + (self.forward.padded if self.forward else 0)

    @property
    def largest(self) -> Shape:
        """The largest value of every number of a shape."""
        rows, context = (self.forward.rows, self.forward.context) if self.forward else (0, 0)
        return Shape(*map(max, self._largest, Shape(decode_rows=rows, decode_live=rows, context=context)))

    def drive(self, loop: Loop, stop: Optional[Callable[[], bool]] = None) -> None:
        env = simpy.Environment()
        env.run(env.process(self._process(env, loop)))

    def _process(self, env: simpy.Environment, loop: Loop) -> Generator[simpy.Event, Any, None]:
        while True:
            instant = loop.step()
            if instant is None:
                continue
            if instant == math.inf:
                return
            self.idle += instant - loop.now
            loop.now = instant
            yield env.timeout(max(0.0, instant - env.now))

    def end_of(self, step: Step, start: float, traits: Traits) -> float:
        return start + self._seconds(step, traits)

    def _seconds(self, step: Step, traits: Traits) -> float:
        """Return a step's time; that of one whole prompt, the usual prefill, is looked up by its length."""
        chunks = step.chunks
        if len(chunks) == 1 and not step.decoders and not step.swapped and self._steady and not self._cold:
            chunk = chunks[0]
            if not chunk.request._cached:
                seconds, padded = self._single.get(chunk.tokens) or self._first_single(chunk.tokens, step, traits)
                self._padded[0] += padded
                return seconds
        shape = shape_of(step, self.padding, traits)
        self._largest = Shape(*map(max, self._largest, shape))
        seconds = self.cost.duration(shape)
        self._padded[0] += shape.prefill_tokens - shape.prefill_live
        self._padded[1] += shape.decode_rows - shape.decode_live
        return seconds + self.cold_start("prefill" if shape.prefill_rows else "decode")

    def _first_single(self, tokens: int, step: Step, traits: Traits) -> tuple[float, int]:
        shape = shape_of(step, self.padding, traits)
        if tokens > self._longest or step.plan.padding:  # a shorter prompt by itself is smaller in every way
            self._longest = max(tokens, self._longest)
            self._largest = Shape(*map(max, self._largest, shape))
        found = self.cost.seconds(shape), shape.prefill_tokens - shape.prefill_live
        if not step.plan.padding:
            self._single[tokens] = found
        return found

    def cold_start(self, kind: str) -> float:
        """Return the extra seconds of the first call of a kind, 0 from then on."""
        return self._cold.pop(kind, 0.0) if self._cold else 0.0
