"""The long part of a leap: many iterations of one plan at once, the same durations added in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
STRIDE = 8192  # iterations at once


def likely(now: float, horizon: float, duration: float, most: float) -> int:
    """Guess how many iterations fit before the horizon, a few to spare."""
    return int(min(most, STRIDE, (horizon - now) / duration + 8 if duration > 0 else STRIDE))


def stride(
    line: tuple[float, float], live: int, context: int, now: float, count: int, horizon: float, free: int,
    phases: Sequence[int], phase: int,
) -> tuple[Array, float, int]:  # fmt: skip
    """Run up to `count` more iterations of a + b * context seconds, none begun beyond the horizon or without blocks.

    `context` is that of the iteration just run, `phase` where its cohort stands in its blocks. Return the durations,
    the end of the last iteration and the blocks taken. Accumulation adds one by one, as single steps do.
    """
    ahead = np.arange(1, count + 1)
    durations: Array = np.asarray(line[0] + line[1] * (context + live * ahead), dtype=np.float64)
    ends = np.add.accumulate(np.concatenate(([now], durations)))
    taken = np.cumsum(np.asarray(phases)[(phase - ahead) % len(phases)])
    fits = int(np.searchsorted(taken, free, side="right"))
    ran = min(count, int(np.searchsorted(ends, horizon, side="left")), fits)
    return durations[:ran], float(ends[ran]), int(taken[ran - 1]) if ran else 0
