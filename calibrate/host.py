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
    row: float = 0.0

    def seconds(self, rows: int) -> float:
        """Return the host's part of a step of so many rows."""
        return self.step + self.row * rows


class Hosted(StepCost):
    """A device's step costs with the host's part added."""

    def __init__(self, cost: StepCost, host: Host) -> None:
        self.cost = cost
        self.host = host

    def seconds(self, shape: Shape) -> float:
        """Return the duration of one step."""
        return self.cost.seconds(shape) + self.host.seconds(shape.prefill_rows + shape.decode_live)

    def decode(self, rows: int, live: int, context: int) -> float:
        """Return the duration of a decode-only step."""
        return self.cost.decode(rows, live, context) + self.host.seconds(live)


def host_of(calls: Sequence[Sequence[Any]]) -> Host:
    """Fit the host's part to calls as `live.told` gives them: start, call, end, and the fields of a shape."""
    import numpy as np

    # The first call waited for its arrival awake, which is not work.
    host = np.array([called - start for start, called, *_ in calls[1:]], dtype=float)
    rows = np.array([call[3] + call[9] for call in calls[1:]], dtype=float)
    if len(host) < FEWEST:
        return Host(float(np.median(host)) if len(host) else 0.0, 0.0)
    usual = host <= np.quantile(host, 1 - TRIM)
    host, rows = host[usual], rows[usual]
    if rows.min() == rows.max():
        return Host(float(host.mean()), 0.0)
    slope, base = (float(value) for value in np.polyfit(rows, host, 1))
    if slope < 0 or base < 0:
        return Host(float(host.mean()), 0.0)
    return Host(base, slope)
