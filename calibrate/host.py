"""What the host adds to a step (booking, deciding, building rows): seconds a step and a row, read off live calls.

Python 3.9 and numpy: it runs next to the device, and beside the simulation too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core import Shape, StepCost

TRIM = 0.05  # share of the slowest calls left out: what a host does there is not its routine
FEWEST = 20  # calls a line is drawn through


@dataclass(frozen=True)
class Host:
    """Seconds of host work around a backend's call."""

    step: float = 0.0
    row: float = 0.0  # a row of the step, prompts and decodes alike
    prompt: float = 0.0  # a prompt's part, beyond its being a row: it moves between queues and takes blocks

    def seconds(self, rows: int, prompts: int = 0) -> float:
        """Return the host's part of a step of so many rows, so many of them prompts."""
        return self.step + self.row * rows + self.prompt * prompts


class Hosted(StepCost):
    """A device's step costs with the host's part added."""

    def __init__(self, cost: StepCost, host: Host) -> None:
        self.cost = cost
        self.host = host

    def seconds(self, shape: Shape) -> float:
        """Return the duration of one step."""
        rows = shape.prefill_rows + shape.decode_live
        return self.cost.seconds(shape) + self.host.seconds(rows, shape.prefill_rows)

    def decode(self, rows: int, live: int, context: int) -> float:
        """Return the duration of a decode-only step."""
        return self.cost.decode(rows, live, context) + self.host.seconds(live)


def host_of(calls: Sequence[Sequence[Any]]) -> Host:
    """Fit the host's part to calls as `live.told` gives them: start, call, end, and the fields of a shape."""
    import numpy as np

    # The first call waited for its arrival awake, which is not work.
    host = np.array([called - start for start, called, *_ in calls[1:]], dtype=float)
    if len(host) < FEWEST:
        return Host(float(np.median(host)) if len(host) else 0.0)
    prompts = np.array([call[3] for call in calls[1:]], dtype=float)
    rows = prompts + np.array([call[9] for call in calls[1:]], dtype=float)
    terms = np.column_stack([np.ones(len(host)), rows, prompts])
    usual = host <= np.quantile(host, 1 - TRIM)
    terms, host = terms[usual], host[usual]
    kept = [0, 1, 2]
    while True:  # none of them can be less than nothing
        found = np.linalg.lstsq(terms[:, kept], host, rcond=None)[0]
        worst = int(found.argmin())
        if found[worst] >= 0 or len(kept) == 1:
            break
        del kept[worst]
    parts = dict(zip(kept, found.tolist()))
    return Host(*(max(0.0, parts.get(term, 0.0)) for term in range(3)))
