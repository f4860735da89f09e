"""The events of an observed run, cut into stretches of time: what is off in each, against the one before.

Instants are seconds since the first request was sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .observed_runs import Observed

Array = NDArray[np.float64]

WINDOWS, EVENTS = 60, 10  # windows of a run at most, and events of one at least
COARSE = 6  # windows to begin with: long ones show where to go from far away
SHORTEST = 0.25  # of the mean span between windows: shorter ones are no more certain
FINEST = 1e-3  # seconds: no log is more exact


def stretches(order: NDArray[np.int64], seen: Array, most: int) -> list[NDArray[np.int64]]:
    """Cut events into at most so many stretches of the same time, each with enough events for a median.

    From the end on: what a batch costs that is no longer full is seen in the last few events alone.
    """
    whole = (seen[order[-1]] - seen[order[0]]) / most
    cuts, end = [], len(order)
    for place in range(len(order) - 1, EVENTS - 1, -1):
        if end - place >= EVENTS and seen[order[end - 1]] - seen[order[place]] >= whole:
            cuts.append(place)
            end = place
    return np.split(order, cuts[::-1])


class Windows:
    """The events of a run in the order they were seen, cut into stretches that are compared as one."""

    def __init__(self, run: Observed, most: int = WINDOWS) -> None:
        self.seen = np.concatenate([run.first, run.end])
        order = np.argsort(self.seen, kind="stable")
        # The first token alone tells the first prefill from the first decode where both compiled.
        self.parts = [order[:1], *stretches(order[1:], self.seen, most)]
        spans = np.diff([0.0, *(float(np.median(self.seen[part])) for part in self.parts)])
        # Step times scatter each by itself: over a span four times as long their sum scatters twice as much.
        self.widths: Array = np.sqrt(np.maximum(spans / max(float(spans.mean()), FINEST), SHORTEST))

    def differences(self, first: Array, end: Array) -> Array:
        """Return how much the residual of each stretch differs from the one before, as if spans were all alike."""
        off = np.concatenate([first, end]) - self.seen
        off = np.where(np.isfinite(off), off, np.nanmax(np.abs(off), initial=1.0))  # never answered in the simulation
        return np.diff([0.0, *(float(np.median(off[part])) for part in self.parts)]) / self.widths
