"""Fit the steps of an engine's log, and write its profile.

Some engines prepare a new padded shape at its first use. Such steps are found, left out of the fit, and their time is
a term of its own. Some engines read the cached tokens in multiples of a number of tokens: this step is found too.
With steps in flight, a late stamp moves time from one step to the next one. There the error is that of successive
steps together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.calibrate.probe.curves import knots_for, rising_basis
from servesim.calibrate.probe.fit import fit_cost
from servesim.calibrate.probe.fit_errors import summary
from servesim.calibrate.probe.fitted_profile import profile_from
from servesim.calibrate.probe.parts_fit import tokens_read
from servesim.calibrate.probe.sample_set import Samples, grouped, predict, without_outliers, write_samples
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
CONTEXT_STEPS = tuple(1024 * 2**k for k in range(8))  # that `find_context_step` tries
MIN_DECODES, MIN_BUCKET = 40, 5  # decode steps of a log, and of each of two buckets, to find such a step
STEP_GAIN = 0.7  # the scatter with such a step, as a fraction of that with a time per cached token
TOGETHER = 0.95  # correlation of rows and context from which their costs cannot be separated
STRETCH = 20  # successive steps whose total is predicted
SCATTERS = 3.0  # a step that is slower than fitted costs by fewer standard deviations is not slow


def fit_log(
    steps: Samples, about: Mapping[str, Any], source: str, width: Optional[int] = None
) -> tuple[Profile, NDArray[np.bool_]]:
    """Fit the steps of a log; return the profile, and which steps prepared new shapes.

    `width`: tokens per shape that the engine prepares, 0 if none; None finds it.
    """
    width = find_width(steps) if width is None else width
    if not 0 <= width <= MAX_NUMBER:
        raise BadInput(f"--first-use: expected at least 0 tokens, got {width}")
    slow = slow_steps(steps, width) if width else np.zeros(len(steps), bool)
    about = {**about, "context_step": find_context_step(steps.select(~slow)) or None}
    profile = profile_from(regular_steps(steps, slow), about, source, about["name"])
    if width:
        slow = slower_than(profile.cost, steps)
        profile = profile_from(regular_steps(steps, slow), about, source, about["name"])
        first_use = {"tokens": width, "seconds": first_use_seconds(steps, width, profile.cost, slow)}
        profile = replace(profile, about={**profile.about, "first_use": first_use})
    return with_log_keys(profile, steps.select(~slow)), slow


def with_log_keys(profile: Profile, steps: Samples) -> Profile:
    """Return the profile with what only a log tells: which loads it shows, and the errors of successive steps."""
    decodes = steps.of_kind("decode")
    rows, context = decodes.column("decode_rows"), decodes.column("context")
    about = dict(profile.about)
    decoding = steps.select(steps.column("context") > 0)
    if len(decoding):
        per_row = decoding.column("context") / decoding.column("decode_live")
        about["grid"] = {**about["grid"], "context_per_row": [float(per_row.min()), float(per_row.max())]}
    if len(decodes) >= MIN_DECODES and rows.std() and context.std():
        correlation = float(np.corrcoef(rows, context)[0, 1])
        about["rows_with_context"] = round(correlation, 3) if correlation > TOGETHER else None
    if steps.column("drafts").any():
        about["drafting"] = {"step": 0.0}  # the drafter's time is part of these steps
    error = stretch_error(steps, about) if steps.in_flight else None
    if error is not None:
        about |= {"error": {f"{STRETCH} successive steps": error}, "error_of_single_steps": about["error"]}
    return replace(profile, about=about)


def stretch_error(steps: Samples, about: Mapping[str, Any]) -> Optional[dict[str, float]]:
    """Return the error of the total time of successive steps, each half of the log predicted from the other one."""
    stretch = np.arange(len(steps)) // STRETCH
    predicted = np.zeros(len(steps))
    for half in (0, 1):
        train = grouped(without_outliers(steps.select(stretch % 2 != half)))
        if not train.show_all_costs:
            return None
        own = stretch % 2 == half
        predicted[own] = predict(fit_cost(train, about), steps.table[own])
    ours, theirs = (np.bincount(stretch, seconds) for seconds in (predicted, steps.seconds))
    return summary(ours / theirs - 1)


def find_context_step(steps: Samples) -> int:
    """Return the multiple in which the engine reads cached tokens; 0 if decode times do not jump like that."""
    decodes = steps.of_kind("decode")
    rows, context, drafts = (decodes.column(name) for name in ("decode_rows", "context", "drafts"))
    if len(decodes) < MIN_DECODES:
        return 0
    scatter = {0: scatter_of(decodes, [*rising_basis(rows, knots_for(rows)).T, context, drafts])}
    for step in CONTEXT_STEPS:
        padded = tokens_read(context, step)
        if (np.unique(padded, return_counts=True)[1] >= MIN_BUCKET).sum() > 1:
            scatter[step] = scatter_of(decodes, [np.ones(len(rows)), rows, padded, drafts])
    best = min(scatter, key=lambda step: scatter[step])
    return best if scatter[best] < STEP_GAIN * scatter[0] else 0


def scatter_of(steps: Samples, columns: Sequence[NDArray[np.float64]]) -> float:
    """Return the median relative residual of a linear fit to the times of steps."""
    design = np.column_stack(columns) / steps.seconds[:, None]
    solution = np.linalg.lstsq(design, np.ones(len(steps)), rcond=None)[0]
    return float(np.median(np.abs(design @ solution - 1)))


def write_log_profile(
    folder: Path, steps: Samples, slow: NDArray[np.bool_], profile: Profile, source: Mapping[str, Any]
) -> None:
    """Write samples.csv and profile.yaml; `source` has the keys that say how the steps were measured.

    A later fit ignores the samples that are flagged.
    """
    flagged = np.where(slow, "new shape", "").tolist()
    write_samples(folder / "samples.csv", steps, overwrite=False, flagged=flagged)
    write_profile(folder, {**profile.about, **source}, profile.cost)


def regular_steps(steps: Samples, slow: NDArray[np.bool_]) -> Samples:
    """Return the steps that prepared no new shape."""
    if slow.all():
        raise BadInput("--first-use: expected steps that prepared no new shape, got none")
    return steps.select(~slow)


def token_buckets(steps: Samples, tokens: int) -> NDArray[np.int64]:
    """Return the bucket of tokens of every step."""
    sizes = steps.column("prefill_tokens") + steps.column("decode_rows") + steps.column("drafts")
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
