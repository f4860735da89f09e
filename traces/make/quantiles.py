"""Quantile tables: draw lengths whose distribution is known only by a few of its quantiles."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CONTEST = Path(__file__).parents[1] / "data" / "contest_lengths.csv"
CONTEST_TOTAL = 512  # the longest prompt and output of the contest's 1500 requests together


def strata(count: int, chance: np.random.Generator) -> Floats:
    """Return uniform numbers, one from each of `count` equal parts of 0 to 1, in random order."""
    return np.asarray((chance.permutation(count) + chance.random(count)) / max(count, 1), np.float64)


def contest_lengths(count: int, chance: np.random.Generator) -> tuple[list[int], list[int]]:
    """Return prompts and outputs like those of the contest: long outputs go with short prompts, as there.

    The contest's set is fixed, so its totals hardly vary from run to run: the draws are stratified.
    """
    with CONTEST.open() as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    table = np.array([[float(cell) for cell in row] for row in rows[1:]])
    at, prompt_at, outputs_at = table[:, 0], table[:, 1], table[:, 2:]
    place = strata(count, chance)
    prompts = np.rint(np.interp(place, at, prompt_at)).astype(np.int64)
    outputs = np.empty(count, np.int64)
    groups = outputs_at.shape[1]
    for group in range(groups):
        members = np.flatnonzero((place * groups).astype(np.int64) == group)
        drawn = np.interp(strata(len(members), chance), at, outputs_at[:, group])
        outputs[members] = np.rint(drawn).astype(np.int64)
    outputs = np.minimum(outputs, CONTEST_TOTAL - prompts)
    return prompts.tolist(), outputs.tolist()
