"""The simulated clock: a step takes the time of the cost model. Its runs are SimPy environments (world.py)."""

from __future__ import annotations

from typing import Callable, Optional

from servesim.core import Shape, StepCost, check_seconds
from servesim.core.limits import MAX_STEP

from .clocks import Clock
from .loop import Loop
from .rules import EngineRules
from .shape import NO_PADDING, Padding, step_shape
from .step import Step
from .world import World


class SimulatedClock(Clock):
    """Virtual time: a step ends at its start plus the seconds of the cost model."""

    def __init__(
        self,
        cost: StepCost,
        padding: Padding = NO_PADDING,
        hold: bool = True,  # plans that hold are repeated without a call of the policy
        cold_start: tuple[float, float] = (0.0, 0.0),  # extra seconds of the first prefill and the first decode
    ) -> None:
        self.cost = cost
        self.reads_longest = cost.reads_longest
        self.padding = padding
        self.hold = hold
        self._padding_tokens = 0  # of prefills
        self._padding_rows = 0  # of decodes
        self._largest_decode = self._most_rows = self._longest = 0  # context, rows and longest context of a decode
        self._largest = list(Shape())  # the largest number of each field so far
        self._row_context = 0.0
        self._deterministic = cost.deterministic
        self._max_single_chunk = 0  # tokens
        self._lines: dict[int, Optional[tuple[float, float]]] = {}  # by decoding rows; see _line
        self._single_chunks: dict[int, tuple[float, int]] = {}  # tokens: seconds, padding tokens; see _seconds
        self._cold = {kind: seconds for kind, seconds in zip(("prefill", "decode"), cold_start) if seconds}

    @property
    def padding_counts(self) -> tuple[int, int]:
        """Computed padding tokens of prefills and padding rows of decodes."""
        return self._padding_tokens, self._padding_rows

    @property
    def largest_shape(self) -> Shape:
        """The element-wise maximum of all shapes that ran."""
        return Shape(*self._largest)

    @property
    def largest_row_context(self) -> float:
        """The largest mean of the cached tokens per decode row of a step."""
        return self._row_context

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
        self._lines.clear()

    def run_loop(self, loop: Loop, stop: Optional[Callable[[], bool]] = None) -> None:
        """Run a loop until all requests are done. `stop` is ignored."""
        world = World(loop)
        world.connect(loop.inbox.clients, loop.send)
        world.run()
        loop.require_done()

    def finish_call(self, step: Step, start: float, rules: EngineRules) -> float:
        return start + self._seconds(step, rules)

    def _seconds(self, step: Step, rules: EngineRules) -> float:
        """Return the duration of a step. For a single chunk without cached tokens, the usual prefill, it is cached."""
        chunks = step.chunks
        if not chunks and step.decode_rows and not step.copied_blocks:
            return self._decode_seconds(step)
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

    def _decode_seconds(self, step: Step) -> float:
        """Return the duration of a step that only decodes, by far the most frequent one."""
        live, context, drafts, longest = step.decode_rows, step.context, step.drafts, step.longest
        rows, extra = live, step.plan.padding_rows
        if self.padding.decode_buckets or extra:
            rows = max(self.padding.pad_rows(live), live + extra)
            self._padding_rows += rows - live
        line = None if drafts or longest else self._line(rows, live)
        if line is not None:
            seconds = line[0] + line[1] * context
        elif drafts:
            seconds = self.cost.verify(rows, live, context, drafts, longest)
        elif longest:
            seconds = self.cost.decode_unequal(rows, live, context, longest)
        else:
            seconds = self.cost.decode(rows, live, context)
        if not 0.0 <= seconds <= MAX_STEP:
            check_seconds(self.cost, seconds)
        if context > self._largest_decode or rows > self._most_rows or longest > self._longest:
            self._largest_decode = max(context, self._largest_decode)
            self._most_rows, self._longest = max(rows, self._most_rows), max(longest, self._longest)
            self._record(tuple.__new__(Shape, (0, 0, 0, 0, 0, rows, live, context, 0, longest, drafts)))
        elif context > self._row_context * live:
            self._row_context = context / live
        return seconds + self.take_cold_start("decode") if self._cold else seconds

    def _line(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        """Return the seconds of a decode at context 0 and per context token, if they are linear in the context."""
        if rows != live:
            return self.cost.linear_in_context(rows, live)
        if live not in self._lines:
            self._lines[live] = self.cost.linear_in_context(live, live)
            for number in self._lines[live] or ():
                if not 0.0 <= number <= MAX_STEP:
                    check_seconds(self.cost, number)
        return self._lines[live]

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
