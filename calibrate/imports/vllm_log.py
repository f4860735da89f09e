"""Read the per-step statistics of vLLM's log (`--enable-logging-iteration-details`).

    Iteration(12): 1 context requests, 512 context tokens, 7 generation requests, 7 generation tokens,
    iteration elapsed time: 21.37 ms

The log has no context lengths: `mean_context` is the mean number of cached tokens of a decoding request, if known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from servesim.core import BadInput, Shape
from servesim.core.limits import MAX_COST, MAX_NUMBER
from servesim.files.read import read_text

from .step_log import TimedStep

LINE = re.compile(
    r"Iteration\((\d{1,15})\): (\d{1,15}) context requests, (\d{1,15}) context tokens, (\d{1,15}) generation requests, "
    r"(\d{1,15}) generation tokens, iteration elapsed time: (\d{1,15}(?:\.\d{1,15})?) ?ms(?! \(dummy\))"
)

MIN_RATIO = 0.05  # of short to long decode steps; their true times differ less


def read_vllm_log(path: Path, mean_context: float = 0.0) -> list[TimedStep]:
    """Return all steps of a log; other lines are skipped. Prompts of one step are taken as equally long."""
    steps = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        match = LINE.search(line)
        if match is None:
            continue
        _, rows, tokens, decodes, _, milliseconds = map(float, match.groups())
        if rows > tokens or bool(rows) != bool(tokens) or max(rows, tokens, decodes) > MAX_NUMBER:
            raise BadInput(f"{path}: row {number}: expected at least one context token per context request")
        seconds = milliseconds / 1e3
        if (tokens or decodes) and 0 < seconds <= MAX_COST:
            squares = round(tokens**2 / rows) if rows else 0
            sizes = (rows, tokens, tokens, squares, 0, decodes, decodes, round(decodes * mean_context))
            steps.append(TimedStep(Shape(*map(int, sizes)), seconds))
    check_durations(path, steps)
    return steps


def check_durations(path: Path, steps: Sequence[TimedStep]) -> None:
    """Raise BadInput if there are no steps, or if their times do not include the device."""
    if not steps:
        raise BadInput(
            f"{path}: expected lines `Iteration(0): 1 context requests, ...` of vLLM with "
            "--enable-logging-iteration-details, got none"
        )
    decodes = [step.seconds for step in steps if not step.shape.prefill_rows] or [step.seconds for step in steps]
    low, high = np.quantile(decodes, [0.1, 0.9])
    if low < MIN_RATIO * high:
        raise BadInput(
            f"{path}: a tenth of the decode steps took less than {low * 1e3:.3g} ms, a tenth over {high * 1e3:.3g} ms: "
            "with asynchronous scheduling, elapsed times do not include the device; log with --no-async-scheduling"
        )
