"""A fake backend: a step sleeps for the time of a cost model. For tests and demonstrations. Times are seconds.

Its tokens depend on every cached token that it reads, so a wrong block table or a lost block changes them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Optional, Union

from servesim.core import BadInput, Shape, StepCost
from servesim.core.limits import MAX_COST, is_number
from servesim.costs.derived import SamplingTerm
from servesim.costs.mapping import cost_from

from .backend import Backend, Model, OutOfMemory, Row, check_choice, shape_of_rows

DEFAULT_COST = {"base": 2e-3, "prefill_token": 2e-5, "decode_row": 1e-4, "context": 5e-7, "swap_block": 1e-4}
DEFAULT_SAMPLING = {"host": {"step": 2e-4, "row": 1e-5}, "device": {"step": 1e-4, "row": 0.0}}
BUSY_WAIT_S = 2e-4  # time.sleep returns about this late, so the last part is a busy wait


class FakeBackend(Backend):
    """A backend that sleeps instead of computing."""

    name = "fake"
    max_steps_in_flight = 2
    speculation = "pretended"

    def __init__(
        self,
        cost: Union[StepCost, Mapping[str, Any], None] = None,  # a cost model, or its mapping from a profile
        lag: float = 0.0,  # seconds of device work after `step` returns; `synchronize` waits for it
        limit: Optional[int] = None,  # maximum tokens of a step; more raise OutOfMemory
        sampling: Optional[str] = None,  # variant that selects the tokens; default: the first of `sampling_terms`
        sampling_terms: Optional[Mapping[str, Mapping[str, float]]] = None,  # seconds per step and row of each variant
    ) -> None:
        self.terms = read_terms(DEFAULT_SAMPLING if sampling_terms is None else sampling_terms)
        self.samplings = tuple(self.terms)
        self.sampling = self.samplings[0] if sampling is None else sampling
        check_choice("sampling", self.sampling, self.samplings)
        self.cost = cost if isinstance(cost, StepCost) else cost_from(DEFAULT_COST if cost is None else cost, "cost")
        self.lag = lag
        self.limit = limit
        self.busy_until = 0.0
        self.model: Optional[Model] = None
        self._tokens: list[int] = []  # of the last step, which the next one may not know when it starts
        self._launched: deque[tuple[list[int], float]] = deque()  # tokens and end of each step in flight

    def load(
        self, model: Model, blocks: int, block_size: int, host_blocks: int = 0, weights: Optional[str] = None
    ) -> None:
        import numpy as np

        if weights is not None:
            raise BadInput(f"weights: the fake backend has none, got {weights!r}")
        self.model = model
        self._launched.clear()
        self.cache = np.zeros((blocks, block_size), np.int64)  # one integer per token
        self.host = np.zeros((host_blocks, block_size), np.int64)

    def launch(self, rows: Sequence[Row]) -> None:
        start = time.perf_counter()
        if self._launched:
            start = max(start, self._launched[-1][1])
        end = start + self._run(rows, self.terms[self.sampling].seconds(len(rows)))
        self._launched.append((self._tokens, end))
        self.busy_until = end + self.lag

    def collect(self) -> list[int]:
        tokens, end = self._launched.popleft()
        wait_until(end)
        return tokens

    def compute(self, rows: Sequence[Row]) -> None:
        start = time.perf_counter()
        self._wait_for_work(start, self._run(rows, 0.0))

    def select_tokens(self, sampling: str) -> list[int]:
        wait_until(time.perf_counter() + self.terms[sampling].seconds(len(self._tokens)))
        return self._tokens

    def _run(self, rows: Sequence[Row], selected: float) -> float:
        """Compute the tokens of the rows; return the seconds of the step if their selection takes `selected` seconds.

        The cost model includes the selection with the first variant.
        """
        count = sum(len(row.tokens) for row in rows)
        if self.limit is not None and count > self.limit:
            raise OutOfMemory(f"fake device: {count} tokens in a step, the limit is {self.limit}")
        self._tokens = [token for row in rows for token in self._next_tokens(row)]
        decodes = [row for row in rows if row.position and len(row.tokens) - row.drafts == 1]
        prompts = [row for row in rows if not (row.position and len(row.tokens) - row.drafts == 1)]
        included = self.terms[self.samplings[0]].seconds(len(rows))
        return max(0.0, self.cost.seconds(shape_of_rows(prompts, decodes)) + (selected - included))

    def _next_tokens(self, row: Row) -> list[int]:
        """Return the next token of a row. It replaces drafts by the right tokens, and returns one more for each."""
        known = len(row.tokens) - row.drafts
        tokens = [self._next_token(row._replace(tokens=row.tokens[:known]))]
        for position in range(row.position + known, row.position + len(row.tokens)):
            tokens.append(self._next_token(Row(tokens[-1:], position, row.table)))
        return tokens

    def _next_token(self, row: Row) -> int:
        import numpy as np

        assert self.model is not None, "load first"
        size = self.cache.shape[1]
        end = row.position + len(row.tokens)
        slots = np.arange(row.position, end)
        tokens = [token if token >= 0 else self._tokens[-1 - token] for token in row.tokens]
        blocks = np.asarray(row.table, np.int64)
        # Each token is weighted by its position: the sum changes when two blocks are exchanged.
        self.cache[blocks[slots // size], slots % size] = (np.asarray(tokens, np.int64) + 1) * (2 * slots + 1)
        context = self.cache[blocks[: -(-end // size)]].ravel()[:end]
        return int(context.sum()) * 2654435761 % self.model.vocab  # Python's numbers: the product can exceed 64 bits

    def _wait_for_work(self, start: float, seconds: float) -> None:
        wait_until(start + seconds)
        self.busy_until = start + seconds + self.lag

    def _swap(self, pairs: Sequence[tuple[int, int]], to_host: bool) -> None:
        start = time.perf_counter()
        source, target = (self.cache, self.host) if to_host else (self.host, self.cache)
        for source_block, target_block in pairs:
            target[target_block] = source[source_block]
        self._wait_for_work(start, self.cost.seconds(Shape(swapped=len(pairs))))

    def synchronize(self) -> None:
        wait_until(self.busy_until)

    def describe(self) -> dict[str, Any]:
        names = {"backend": self.name, "device": "fake", "kernels": "fake", "sampling": self.sampling, "versions": {}}
        if self.model is None:
            return names
        blocks, block_size = self.cache.shape
        cache = {"blocks": blocks, "block_size": block_size, "host_blocks": self.host.shape[0]}
        return {**names, "model": asdict(self.model), "dtype": self.model.dtype, **cache}


def read_terms(terms: Any) -> dict[str, SamplingTerm]:
    """Return the option `sampling_terms` after checking it."""

    def is_term(term: Any) -> bool:
        keys = isinstance(term, Mapping) and set(term) == {"step", "row"}
        return keys and all(is_number(value, 0, MAX_COST) for value in term.values())

    if not isinstance(terms, Mapping) or not terms or not all(map(is_term, terms.values())):
        expected = "seconds per variant, e.g. {host: {step: 0.0002, row: 0.00001}}"
        raise BadInput(f"sampling_terms: expected {expected}, got {terms!r}")
    return {str(name): SamplingTerm(float(term["step"]), float(term["row"])) for name, term in terms.items()}


def wait_until(deadline: float) -> None:
    """Return at this time of time.perf_counter."""
    left = deadline - time.perf_counter()
    if left > BUSY_WAIT_S:
        time.sleep(left - BUSY_WAIT_S)
    while time.perf_counter() < deadline:
        pass
