"""Utilisation, memory and power of the device during a measured run: means, energy, and device.csv.

A row is one sample: its time in seconds since the start of the run, then the counters in the order of COLUMNS. A
counter that the tool does not report is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.files.write import csv_writer, open_text

COLUMNS = ("time", "utilisation_percent", "memory_busy_percent", "memory_mb", "power_w")
TIME, UTILISATION, MEMORY_BUSY, MEMORY, POWER = range(5)
MAX_GAP_S = 5.0  # a run without a sample for longer than this, at its start or end, has no means
Rows = Sequence[Sequence[Optional[float]]]


def integral(rows: Rows, column: int, end: float) -> Optional[float]:
    """Return a counter times seconds from 0 to `end`, linear between samples; None if samples are missing."""
    known = [(row[TIME], row[column]) for row in rows if row[TIME] is not None and row[column] is not None]
    if not known or end <= 0:
        return None
    times, values = np.array(known, dtype=float).T
    if times[0] > min(end, MAX_GAP_S) or times[-1] < max(0.0, end - MAX_GAP_S):
        return None
    points = np.concatenate([[0.0], times[(times > 0) & (times < end)], [end]])
    levels = np.interp(points, times, values)
    return float(((levels[1:] + levels[:-1]) / 2 * np.diff(points)).sum())


def summarise(counters: Mapping[str, Any], end: float) -> dict[str, Any]:
    """Return the means of the counters and the energy of a run, for result.json."""
    rows = counters["samples"]
    inside = [row for row in rows if 0 <= row[TIME] <= end]
    totals = {column: integral(rows, column, end) for column in (UTILISATION, MEMORY_BUSY, POWER)}
    means = {column: None if total is None else total / end for column, total in totals.items()}
    return {
        "tool": counters["tool"],
        "samples": len(inside),
        "utilisation_percent": means[UTILISATION],
        "memory_busy_percent": means[MEMORY_BUSY],
        "max_memory_mb": max((row[MEMORY] for row in inside if row[MEMORY] is not None), default=None),
        "power_w": means[POWER],
        "energy_j": totals[POWER],
    }


def write_counters(rows: Rows, path: Path) -> None:
    """Write device.csv."""
    with open_text(path) as file:
        writer = csv_writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(["" if value is None else value for value in row] for row in rows)


def describe_counters(summary: Mapping[str, Any]) -> str:
    """Return the means of a run in one line."""
    parts = [
        f"{name} {summary[key]:.{digits}f} {unit}"
        for name, key, unit, digits in (
            ("utilisation", "utilisation_percent", "%", 1),
            ("memory busy", "memory_busy_percent", "%", 1),
            ("memory", "max_memory_mb", "MB", 0),
            ("power", "power_w", "W", 0),
        )
        if summary[key] is not None
    ]
    return f"device counters ({summary['tool']}, {summary['samples']} samples): {', '.join(parts) or 'none in the run'}"
