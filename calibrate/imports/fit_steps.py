"""Fit the steps of an engine's log, and write its profile.

Some engines prepare a new padded shape at its first use. Such steps are found, left out of the fit, and their time is
a term of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.calibrate.probe.fitted_profile import profile_from
from servesim.calibrate.probe.predict import predict
from servesim.calibrate.probe.sample_set import Samples, write_samples
from servesim.core import BadInput, StepCost
from servesim.core.limits import MAX_NUMBER
from servesim.costs.device_profile import Profile, write_profile

SLOW = 1.5  # a step is slow if it takes this many times as long as the faster steps of its bucket
FAST_QUANTILE = 0.25  # more than half of the steps of a rare bucket can be slow
MIN_STEPS = 3  # of a bucket: the faster steps of fewer are not known
WIDTHS = (16, 32, 64, 128, 256, 512)  # bucket widths that `find_width` tries
NEAREST = 12  # steps with the nearest number of tokens, to which `find_width` compares a step
MIN_LOST = 0.02  # of the total time: less lost time is not worth a term
MIN_FIRST = 4  # slow first steps
MIN_CONTRAST = 3.0  # first steps must be slow this many times as often as other steps: else the times only scatter
SCATTERS = 3.0  # a step that is slower than fitted costs by fewer standard deviations is not slow


class StepLogFit(NamedTuple):
    """The profile of a step log, and the steps that prepared new shapes."""

    profile: Profile
    width: int  # tokens per new shape; 0: the engine prepares none
    slow: NDArray[np.bool_]


def fit_log(steps: Samples, about: Mapping[str, Any], source: str, width: Optional[int] = None) -> StepLogFit:
    """Fit the steps of a log. `width`: tokens per shape that the engine prepares, 0 if none; None finds it."""
    width, slow = first_uses(steps, width)
    profile = profile_from(regular_samples(steps, slow), about, source, about["name"])
    if width:
        slow = slower_than(profile.cost, steps)
        profile = profile_from(regular_samples(steps, slow), about, source, about["name"])
        first_use = {"tokens": width, "seconds": first_use_seconds(steps, width, profile.cost, slow)}
        profile = Profile(profile.name, profile.cost, {**profile.about, "first_use": first_use})
    return StepLogFit(profile, width, slow)


def write_log_samples(folder: Path, steps: Samples, slow: NDArray[np.bool_]) -> None:
    """Write samples.csv. A fit ignores flagged rows."""
    flagged = np.where(slow, "new shape", "").tolist()
    write_samples(folder / "samples.csv", steps, overwrite=False, flagged=flagged)


def write_log_profile(folder: Path, steps: Samples, fit: StepLogFit, source: Mapping[str, Any]) -> None:
    """Write samples.csv and profile.yaml; `source` has the keys that say how the steps were measured."""
    write_log_samples(folder, steps, fit.slow)
    write_profile(folder, {**fit.profile.about, **source}, fit.profile.cost)


def regular_samples(steps: Samples, slow: NDArray[np.bool_]) -> Samples:
    """Return the steps that prepared no new shape."""
    if slow.all():
        raise BadInput("--first-use: expected steps that prepared no new shape, got none")
    return steps.select(~slow)


def first_uses(steps: Samples, width: Optional[int] = None) -> tuple[int, NDArray[np.bool_]]:
    """Return the tokens per shape that the engine prepares, 0 if it prepares none, and which steps did."""
    width = find_width(steps) if width is None else width
    if not 0 <= width <= MAX_NUMBER:
        raise BadInput(f"--first-use: expected at least 0 tokens, got {width}")
    return width, slow_steps(steps, width) if width else np.zeros(len(steps), bool)


def token_buckets(steps: Samples, tokens: int) -> NDArray[np.int64]:
    """Return the bucket of tokens of every step."""
    sizes = steps.column("prefill_tokens") + steps.column("decode_rows")
    return np.asarray(-(-sizes // tokens), np.int64)


def slow_steps(steps: Samples, tokens: int) -> NDArray[np.bool_]:
    """Return which steps are the first of their bucket of tokens, or much slower than others of the bucket."""
    seconds = steps.seconds
    buckets = token_buckets(steps, tokens)
    slow = np.zeros(len(steps), bool)
    for bucket in np.unique(buckets):
        members = np.flatnonzero(buckets == bucket)
        slow[members[0]] = True
        if len(members) >= MIN_STEPS:
            slow[members] |= seconds[members] > SLOW * np.quantile(seconds[members], FAST_QUANTILE)
    return slow


def find_width(steps: Samples) -> int:
    """Return the bucket width whose first steps agree best with the slow steps; 0 if there is no such pattern."""
    seconds = steps.seconds
    tokens = token_buckets(steps, 1)
    order = np.argsort(tokens, kind="stable")
    fast = np.empty(len(steps))
    for position, k in enumerate(order):
        window = order[max(0, position - NEAREST // 2) : position + NEAREST // 2 + 1]
        fast[k] = np.quantile(seconds[window], FAST_QUANTILE)
    slow = seconds > SLOW * fast
    if (seconds - fast)[slow].sum() < MIN_LOST * seconds.sum():
        return 0
    scores = {}
    for width in WIDTHS:
        firsts = np.unique(token_buckets(steps, width), return_index=True)[1]
        found = int(slow[firsts].sum())
        usual = (slow.sum() - found) / max(1, len(steps) - len(firsts))  # fraction of the other steps
        if found >= max(MIN_FIRST, len(firsts) / 2, MIN_CONTRAST * usual * len(firsts)):
            scores[width] = 2 * found / (len(firsts) + slow.sum())  # harmonic mean of precision and recall
    return max(scores, key=lambda width: scores[width], default=0)


def slower_than(cost: StepCost, steps: Samples) -> NDArray[np.bool_]:
    """Return which steps are much slower than fitted costs.

    An engine can prepare a bucket several times, for example for longer contexts, and can know some buckets before the
    first step. A fit without the first steps of the buckets tells both.
    """
    ratios = np.log(steps.seconds / predict(cost, steps.table))
    scatter = 1.4826 * float(np.median(np.abs(ratios)))
    return np.asarray(ratios > max(np.log(SLOW), SCATTERS * scatter), bool)


def first_use_seconds(steps: Samples, tokens: int, cost: StepCost, slow: NDArray[np.bool_]) -> float:
    """Return the time lost in slow steps, per bucket."""
    lost: float = sum((steps.seconds - predict(cost, steps.table))[slow].tolist())
    return max(0.0, lost / len(np.unique(token_buckets(steps, tokens))))
