"""What the host adds to a step (booking, deciding, building rows): seconds a step and a row, read off live calls.

Python 3.9 and numpy: it runs next to the device, and beside the simulation too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servesim.core import Shape, StepCost
from servesim.engine.step import ModelCall

SLOW = 10.0  # times the median beyond which a call is left out: what a host does there is not its routine
FEWEST = 20  # calls a line is drawn through


@dataclass(frozen=True)
class Host:
    """Seconds of host work around a backend's call."""

    step: float = 0.0
    row: float = 0.0  # a row of the step, prompts and decodes alike
    prompt: float = 0.0  # a prompt's part, beyond its being a row: it moves between queues and takes blocks
    token: float = 0.0  # of a prompt's part: it is told, and its block is taken

    def seconds(self, rows: int, prompts: int = 0, tokens: int = 0) -> float:
        """Return the host's part of a step; `tokens` are those of its prompts together."""
        return self.step + self.row * rows + self.prompt * prompts + self.token * tokens


class Hosted(StepCost):
    """A device's step costs with the host's part added."""

    def __init__(self, cost: StepCost, host: Host) -> None:
        self.cost = cost
        self.host = host

    @property
    def steady(self) -> bool:
        return self.cost.steady

    def seconds(self, shape: Shape) -> float:
        rows = shape.prefill_rows + shape.decode_live
        return self.cost.seconds(shape) + self.host.seconds(rows, shape.prefill_rows, shape.prefill_tokens)

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.cost.decode(rows, live, context) + self.host.seconds(live)


def parts_of(calls: Sequence[ModelCall]) -> list[tuple[float, int, int, int]]:
    """Return (seconds of the host, rows, prompts, their tokens) of measured calls."""
    # The first call waited for its arrival awake, which is not work.
    return [
        (call.called - call.start, call.shape.prefill_rows + call.shape.decode_live, call.shape.prefill_rows,
         call.shape.prefill_tokens)
        for call in calls[1:]
    ]  # fmt: skip


def host_of(parts: Sequence[Sequence[float]]) -> Host:
    """Fit the host's part of a step to those of many."""
    import numpy as np

    if len(parts) < FEWEST:
        return Host(float(np.median([part[0] for part in parts])) if parts else 0.0)
    told = np.array(parts, dtype=float)
    told = told[told[:, 0] <= SLOW * np.median(told[:, 0])]
    terms, host = np.column_stack([np.ones(len(told)), told[:, 1:]]), told[:, 0]
    kept = list(range(terms.shape[1]))
    while True:  # none of them can be less than nothing
        found = np.linalg.lstsq(terms[:, kept], host, rcond=None)[0]
        worst = int(found.argmin())
        if found[worst] >= 0 or len(kept) == 1:
            break
        del kept[worst]
    fitted = dict(zip(kept, found.tolist()))
    return Host(*(max(0.0, fitted.get(term, 0.0)) for term in range(terms.shape[1])))
