"""The durations of the steps in the log of an engine.

The duration of a step is `seconds`, or the time until the next step starts. A log may contain a sample of the steps:
then `step` tells which rows are adjacent, and only their durations are known. Host time is part of a duration. Steps
that start at the same time, because stamps are rounded, share the time until the next stamp. With asynchronous
scheduling, a step starts before the end of the one before: then its duration is the time between the two ends.

The recorder of vLLM (calibrate/adapter/vllm_recorder.py) writes such a log: `batch` has the prompt chunks, and
`decode_rows` and `context` the other rows. Its first line is a `header` with the settings of the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Optional

import numpy as np
from servesim.calibrate.probe.sample_set import Samples
from servesim.core import BadInput, Shape
from servesim.files.step_table import MeasuredStep, read_steps

IDLE_GAPS = 5.0  # a gap between two steps of more than this many median gaps: the engine had nothing to do


def read_step_log(path: Path, columns: Optional[Mapping[str, str]] = None, unit: str = "s") -> Samples:
    """Return the steps of a log whose durations are known, in order."""
    steps = read_steps(path, columns=columns, unit=unit)
    for one, two in zip(steps, steps[1:]):
        if one.start is not None and two.start is not None and two.start < one.start:
            raise BadInput(
                f"{path}: step {two.number}: expected start times in order, got {two.start:g} s after {one.start:g} s"
            )
    timed = timed_steps(steps)
    if not len(timed):
        raise BadInput(f"{path}: expected seconds, or two adjacent steps with start times; no duration is known")
    gaps = gaps_between(steps)
    return replace(timed, in_flight=2 * sum(gap < 0 for gap in gaps) > len(gaps))


def timed_steps(steps: Sequence[MeasuredStep]) -> Samples:
    """Return the steps whose durations are known. Steps of one shape are samples of one point."""
    host, shapes, times = host_gap(steps), list[Shape](), list[float]()
    for first, last in same_stamps(steps):
        before, after = steps[first - 1] if first else None, steps[last + 1] if last + 1 < len(steps) else None
        seconds = duration(steps[last], before, after, host) or 0.0
        if seconds > 0 and steps[last].good:
            shapes += [step.shape for step in steps[first : last + 1]]
            times += [seconds / (last + 1 - first)] * (last + 1 - first)
    return Samples.from_shapes(shapes, times)


def same_stamps(steps: Sequence[MeasuredStep]) -> list[tuple[int, int]]:
    """Return the first and last position of every run of steps with one stamp. Most runs have one step."""
    runs: list[tuple[int, int]] = []
    for k, step in enumerate(steps):
        before = steps[k - 1] if k else None
        stamped = step.start is not None and step.end is None and step.seconds is None
        if stamped and before is not None and before.start == step.start and follows(before, step):
            runs[-1] = runs[-1][0], k
        else:
            runs.append((k, k))
    return runs


def follows(one: MeasuredStep, two: Optional[MeasuredStep]) -> bool:
    """Whether the second step is the next one of the engine and has a start time."""
    return two is not None and two.number == one.number + 1 and two.start is not None


def gaps_between(steps: Sequence[MeasuredStep]) -> list[float]:
    """Return the times from the ends of steps to the starts of the next ones; below 0 with steps in flight."""
    pairs = [(one.end, two.start) for one, two in zip(steps, steps[1:]) if follows(one, two)]
    return [start - end for end, start in pairs if end is not None and start is not None]


def host_gap(steps: Sequence[MeasuredStep]) -> float:
    """Return the median time from the end of a step to the start of the next one; 0 if it starts before, or no ends."""
    gaps = gaps_between(steps)
    return max(0.0, float(np.median(gaps))) if gaps else 0.0


def duration(
    one: MeasuredStep, before: Optional[MeasuredStep], two: Optional[MeasuredStep], host: float
) -> Optional[float]:
    """Return the seconds of a step, from its own times or from the start of the next one; None if not known."""
    if one.seconds is not None or one.start is None:
        return one.seconds
    next_start = two.start if two is not None and follows(one, two) else None
    if one.end is not None:
        start = one.start
        if before is not None and before.end is not None and follows(before, one):
            start = max(start, before.end)  # asynchronous: the device first ends that step
        gap = host if next_start is None else max(0.0, next_start - one.end)
        return one.end - start + (gap if gap <= IDLE_GAPS * host else host)
    if two is None or next_start is None or not was_busy(one, two):
        return None
    return next_start - one.start


def was_busy(one: MeasuredStep, two: MeasuredStep) -> bool:
    """Whether the engine started the second step right after the first one, as far as the log tells."""
    if one.requests or two.requests:
        return bool(one.requests & two.requests) or bool(one.waiting)
    return two.shape.decode_rows > 0 or bool(one.waiting)
