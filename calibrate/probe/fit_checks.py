"""Checks of every fit. A fit that fails one is not written: the message says what is wrong."""

from __future__ import annotations

from typing import Union

import numpy as np
from servesim.core import BadInput, Shape, StepCost

from .predictions import predict
from .sample_set import Array, Groups

MAX_TOTAL_ERROR = 0.02  # of the total time of the fitted samples, per kind of step
MIN_SAMPLES = 20  # the total time of fewer samples is not checked: one stalled step can dominate it
FAR = 32.0  # the grid goes to this multiple of the largest measured values
STEPS = 12
Sizes = Union[float, Array]


def check_fit(cost: StepCost, groups: Groups, where: str) -> None:
    """Raise BadInput if a fit is not finite, positive and rising, or does not reproduce the total times."""
    check_shape_of_cost(cost, groups, where)
    for kind, error in total_errors(cost, groups).items():
        if abs(error) > MAX_TOTAL_ERROR and groups.counts[groups.kinds == kind].sum() >= MIN_SAMPLES:
            raise BadInput(
                f"{where}: the total time of the fitted {kind} steps differs by {error:+.1%} from the measured one, "
                f"expected at most {MAX_TOTAL_ERROR:.0%}: these step times do not follow from their shapes"
            )


def total_errors(cost: StepCost, groups: Groups) -> dict[str, float]:
    """Return predicted / measured - 1 of the total time of each kind of step."""
    predicted = predict(cost, groups.table)
    errors = {}
    for kind in np.unique(groups.kinds):
        own = groups.kinds == kind
        measured = float((groups.counts * groups.seconds)[own].sum())
        errors[str(kind)] = float((groups.counts * predicted)[own].sum()) / measured - 1
    return errors


def check_shape_of_cost(cost: StepCost, groups: Groups, where: str) -> None:
    """Raise BadInput if a step time far beyond the samples is not finite and positive, or falls with more work."""
    for name, tables in growing_steps(groups).items():
        for table in tables:
            seconds = predict(cost, table)
            if not (np.isfinite(seconds).all() and (seconds > 0).all()):
                bad = table[int(np.argmin(np.where(np.isfinite(seconds), seconds, -np.inf)))]
                raise BadInput(f"{where}: the fitted time of {describe(bad)} is not finite and positive")
            falling = np.flatnonzero(np.diff(seconds) < -1e-9 * seconds[:-1])
            if len(falling):
                bad = table[falling[0] + 1]
                raise BadInput(f"{where}: the fitted time falls with more {name} at {describe(bad)}")


def describe(row: Array) -> str:
    """Return a shape as text."""
    return ", ".join(f"{name} {value:g}" for name, value in zip(Shape._fields, row, strict=True) if value)


def growing_steps(groups: Groups) -> dict[str, list[Array]]:
    """Return series of steps in which one size grows from the smallest to far beyond the measured values."""
    names = ("prefill_tokens", "prefill_rows", "decode_rows", "context")
    tokens, prompts, rows, context = (
        np.unique(np.round(np.geomspace(1, FAR * max(float(groups.column(name).max()), 1.0), STEPS))) for name in names
    )
    series: dict[str, list[Array]] = {"prompt tokens": [], "prompt rows": [], "decode rows": [], "context": []}
    for decoding in (0.0, 1.0, float(rows[-1])):
        decodes = {"decode_rows": decoding, "context": 100 * decoding}
        series["prompt tokens"].append(steps(prefill_rows=1.0, tokens=tokens, **decodes))
        series["prompt rows"].append(steps(prefill_rows=prompts, tokens=prompts * 16, **decodes))
    for length in (0.0, 1.0, float(tokens[-1])):
        chunk = {"prefill_rows": float(length > 0), "tokens": length}
        series["decode rows"].append(steps(decode_rows=rows, context=float(context[-1]), **chunk))
        series["decode rows"].append(steps(decode_rows=rows, context=rows * 100, **chunk))
        series["context"].append(steps(decode_rows=1.0, context=context, **chunk))
    return series


def steps(prefill_rows: Sizes = 0.0, tokens: Sizes = 0.0, decode_rows: Sizes = 0.0, context: Sizes = 0.0) -> Array:
    """Return a table of shapes: equal prompts, each after as many cached tokens as it has."""
    prompts, total, rows, cached = np.broadcast_arrays(prefill_rows, tokens, decode_rows, context)
    squares = total**2 / np.maximum(prompts, 1)
    return np.column_stack([prompts, total, total, squares, squares, rows, rows, cached, np.zeros(len(total))])
