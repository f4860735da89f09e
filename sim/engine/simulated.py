"""The simulated clock: a step takes the time of the cost model. Held steps are fast-forwarded. Uses SimPy."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, Callable, Optional

import simpy
from servesim.core import Shape, StepCost, check_seconds
from servesim.core.limits import MAX_STEP

from .clocks import Clock
from .fast_forward import FastForward
from .held_drafts import HeldDrafts
from .loop import Loop
from .rules import EngineRules
from .shape import NO_PADDING, Padding, step_shape
from .step import Step


class SimulatedClock(Clock):
    """SimPy's clock. `env.now` sums delays and can have a rounding error, so the loop keeps the exact time."""

    def __init__(
        self,
        cost: StepCost,
        padding: Padding = NO_PADDING,
        allow_fast_forward: bool = True,
        cold_start: tuple[float, float] = (0.0, 0.0),  # extra seconds of the first prefill and the first decode
    ) -> None:
        self.cost = cost
        self.reads_longest = cost.reads_longest
        self.padding = padding
        self.allow_fast_forward = allow_fast_forward
        self.fast_forward: Optional[FastForward] = None
        self.idle_s = 0.0  # seconds without a model call
        self._padding_tokens = 0  # of prefills
        self._padding_rows = 0  # of decodes, without fast-forward
        self._largest = list(Shape())  # the largest number of each field so far
        self._row_context = 0.0
        self._deterministic = cost.deterministic
        self._max_single_chunk = 0  # tokens
        self._single_chunks: dict[int, tuple[float, int]] = {}  # tokens: seconds, padding tokens; see _seconds
        self._cold = {kind: seconds for kind, seconds in zip(("prefill", "decode"), cold_start) if seconds}

    def make_fast_forward(self, loop: Loop) -> Optional[FastForward]:
        """Return the object that runs held steps as one event. Observers that need every step turn it off."""
        needed = any(getattr(observer, "every_step", True) for observer in loop.observers)
        if self.allow_fast_forward and not needed:
            cohort, settings = loop.server.draft_cohort, (loop, self.cost, self.padding, self.take_cold_start)
            self.fast_forward = FastForward(*settings) if cohort is None else HeldDrafts(*settings, cohort)
        return self.fast_forward

    @property
    def padding_counts(self) -> tuple[int, int]:
        """Computed padding tokens of prefills and padding rows of decodes."""
        return self._padding_tokens, self._padding_rows + (self.fast_forward.padding_rows if self.fast_forward else 0)

    @property
    def largest_shape(self) -> Shape:
        """The element-wise maximum of all shapes that ran."""
        rows, context = (self.fast_forward.max_rows, self.fast_forward.max_context) if self.fast_forward else (0, 0)
        return Shape(*map(max, self._largest, Shape(decode_rows=rows, decode_live=rows, context=context)))

    @property
    def largest_row_context(self) -> float:
        """The largest mean of the cached tokens per decode row of a step."""
        return max(self._row_context, self.fast_forward.max_row_context if self.fast_forward else 0.0)

    def _record(self, shape: Shape) -> None:
        largest = self._largest
        if shape.context > self._row_context * shape.decode_live:
            self._row_context = shape.context / shape.decode_live
        for index, number in enumerate(shape):
            if number > largest[index]:
                largest[index] = number

    def change_cost(self, cost: StepCost) -> None:
        """Use another cost model from now on."""
        self.cost = cost
        self._single_chunks.clear()
        if self.fast_forward is not None:
            self.fast_forward.change_cost(cost)

    def run_loop(self, loop: Loop, stop: Optional[Callable[[], bool]] = None) -> None:
        """Run a loop until all requests are done. `stop` is ignored."""
        env = simpy.Environment()
        env.run(env.process(self._process(env, loop)))

    def _process(self, env: simpy.Environment, loop: Loop) -> Generator[simpy.Event, Any, None]:
        while True:
            try:
                next_event = loop.run_until_wait()
            except StopIteration as error:  # of a user's policy; compiled generators do not convert it
                raise RuntimeError("generator raised StopIteration") from error
            if next_event == math.inf:
                return
            self.idle_s += next_event - loop.now
            loop.now = next_event
            yield env.timeout(max(0.0, next_event - env.now))

    def finish_call(self, step: Step, start: float, rules: EngineRules) -> float:
        return start + self._seconds(step, rules)

    def _seconds(self, step: Step, rules: EngineRules) -> float:
        """Return the duration of a step. For a single chunk without cached tokens, the usual prefill, it is cached."""
        chunks = step.chunks
        if (
            len(chunks) == 1
            and not step.decode_rows
            and not step.copied_blocks
            and self._deterministic
            and not self._cold
        ):
            chunk = chunks[0]
            request = chunk.request
            if not (request._cached or request.sampling is not None or (chunk.tokens == 1 and rules.one_token_decodes)):
                known = self._single_chunks.get(chunk.tokens)
                seconds, padding = self._single_chunk(chunk.tokens, step, rules) if known is None else known
                self._padding_tokens += padding
                return seconds
        shape = step_shape(step, self.padding, rules)
        self._record(shape)
        seconds = self.cost.duration(shape)
        if not 0.0 <= seconds <= MAX_STEP:
            check_seconds(self.cost, seconds)
        self._padding_tokens += shape.prefill_tokens - shape.prefill_live
        self._padding_rows += shape.decode_rows - shape.decode_live
        return seconds + self.take_cold_start("prefill" if shape.prefill_rows else "decode")

    def _single_chunk(self, tokens: int, step: Step, rules: EngineRules) -> tuple[float, int]:
        shape = step_shape(step, self.padding, rules)
        if tokens > self._max_single_chunk or step.plan.padding_rows:  # otherwise no number of the shape is larger
            self._max_single_chunk = max(tokens, self._max_single_chunk)
            self._record(shape)
        result = self.cost.seconds(shape), shape.prefill_tokens - shape.prefill_live
        if not 0.0 <= result[0] <= MAX_STEP:
            check_seconds(self.cost, result[0])
        if not step.plan.padding_rows:
            self._single_chunks[tokens] = result
        return result

    def take_cold_start(self, kind: str) -> float:
        """Return the extra seconds of the first call of a kind, and 0 for later calls."""
        return self._cold.pop(kind, 0.0) if self._cold else 0.0
