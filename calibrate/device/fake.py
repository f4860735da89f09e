"""A device made of sleep: a step takes what a cost model says, and its tokens depend on every cached token it reads.

Times are seconds. For tests and demonstrations; a wrong block table or a lost block changes the tokens, as on a device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Optional, Union

from servesim.core import BadInput, Shape, StepCost
from servesim.costs.mapping import cost_from

from .backend import Backend, Model, OutOfMemory, Row, shape

COST = {"base": 2e-3, "prefill_token": 2e-5, "decode_row": 1e-4, "context": 5e-7, "swap_block": 1e-4}
SPIN = 2e-4  # a sleep oversleeps by about this, so the end of it is waited out awake


class Fake(Backend):
    """A backend that sleeps."""

    name = "fake"

    def __init__(
        self,
        cost: Union[StepCost, Mapping[str, Any], None] = None,  # a model, or one as profiles write it
        lag: float = 0.0,  # seconds of work that a step leaves behind, as an asynchronous device: synchronize waits
        limit: Optional[int] = None,  # tokens a step can hold; more is out of memory
    ) -> None:
        self.cost = cost if isinstance(cost, StepCost) else cost_from(COST if cost is None else cost, "cost")
        self.lag = lag
        self.limit = limit
        self.busy_until = 0.0
        self.model: Optional[Model] = None

    def load(
        self, model: Model, blocks: int, block_size: int, host_blocks: int = 0, weights: Optional[str] = None
    ) -> None:
        import numpy as np

        if weights is not None:
            raise BadInput(f"weights: the fake backend has none, got {weights!r}")
        self.model = model
        self.cache = np.zeros((blocks, block_size), np.int64)  # one integer a token
        self.host = np.zeros((host_blocks, block_size), np.int64)

    def step(self, rows: Sequence[Row]) -> list[int]:
        start = time.perf_counter()
        tokens = sum(len(row.tokens) for row in rows)
        if self.limit is not None and tokens > self.limit:
            raise OutOfMemory(f"fake device: {tokens} tokens in a step, it holds {self.limit}")
        answer = [self._next(row) for row in rows]
        decodes = [row for row in rows if row.position and len(row.tokens) == 1]
        prompts = [row for row in rows if not (row.position and len(row.tokens) == 1)]
        self._work(start, self.cost.seconds(shape(prompts, decodes)))
        return answer

    def _next(self, row: Row) -> int:
        import numpy as np

        assert self.model is not None, "load first"
        size = self.cache.shape[1]
        end = row.position + len(row.tokens)
        slots = np.arange(row.position, end)
        blocks = np.asarray(row.table, np.int64)
        # A token counts by where it stands, so that swapped blocks do not add up to the same.
        self.cache[blocks[slots // size], slots % size] = (np.asarray(row.tokens, np.int64) + 1) * (2 * slots + 1)
        context = self.cache[blocks[: -(-end // size)]].ravel()[:end]
        return int(context.sum() * 2654435761 % self.model.vocab)

    def _work(self, start: float, seconds: float) -> None:
        wait_until(start + seconds)
        self.busy_until = start + seconds + self.lag

    def _swap(self, pairs: Sequence[tuple[int, int]], out: bool) -> None:
        start = time.perf_counter()
        source, target = (self.cache, self.host) if out else (self.host, self.cache)
        for one, other in pairs:
            target[other] = source[one]
        self._work(start, self.cost.seconds(Shape(swapped=len(pairs))))

    def synchronize(self) -> None:
        wait_until(self.busy_until)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"backend": self.name, "device": "fake", "kernels": "fake", "versions": {}}
        if self.model is not None:
            described.update(
                model=asdict(self.model),
                dtype=self.model.dtype,
                blocks=self.cache.shape[0],
                block_size=self.cache.shape[1],
                host_blocks=self.host.shape[0],
            )
        return described


def wait_until(instant: float) -> None:
    """Return at an instant of time.perf_counter."""
    left = instant - time.perf_counter()
    if left > SPIN:
        time.sleep(left - SPIN)
    while time.perf_counter() < instant:
        pass
