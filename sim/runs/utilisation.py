"""Utilisation of the device in a run: MFU, MBU and energy; and the counters that a device reports in a live run.

MFU (model FLOPs utilisation) is the FLOPs of the model over those of the device at its peak, in the time of the model
calls. MBU (memory-bandwidth utilisation) is the same for bytes of memory. They use the same sums in simulated and
measured runs. Energy is in joules per 1,000 generated tokens.
The counters are utilisation, memory and power: result.json has their means and the energy, device.csv every sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.costs.model_arithmetic import Model, Peak, bytes_per_value, model_of, peak_of
from servesim.engine.work_totals import KindTotals
from servesim.files.write import open_text, write_rows

from .metric_table import metric_named

TOKENS = 1000  # the energy is that of this many generated tokens
HOW_TO_ADD = {
    "peak": "expected `peak` in the profile (flops, bandwidth, source), a known `dtype`, and a known `model` or its "
    "sizes",
    "power": "expected `power` in the profile (watts: idle, prefill, decode); "
    "`sim calibrate probe` measures it if nvidia-smi or npu-smi is available",
}  # fmt: skip


def utilisation(work: Mapping[str, KindTotals], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return MFU and MBU of a run, and its work by kind of step; `about` describes device and model, as a profile.

    What cannot be computed is None: FLOPs and bytes without the dimensions of the model, MFU and MBU without a peak.
    """
    model, peak = model_of(about), peak_of(about)
    size = None if model is None else bytes_per_value(about, model)
    kinds: dict[str, dict[str, Any]] = {}
    for kind, sums in work.items():
        if sums.steps:
            row: dict[str, Any] = {"steps": sums.steps, "seconds": sums.seconds, "tokens": sums.tokens}
            row.update(arithmetic(sums, model, size))
            kinds[kind] = {**row, **fractions(row, peak)}
    total: dict[str, Any] = {"seconds": sum(row["seconds"] for row in kinds.values())}
    for key in ("flops", "bytes"):
        values = [row[key] for row in kinds.values()]
        total[key] = None if None in values else sum(values)
    return {**fractions(total, peak), "utilisation": kinds}


def arithmetic(sums: KindTotals, model: Optional[Model], size: Optional[float]) -> dict[str, Optional[int]]:
    """Return the FLOPs and bytes of all steps of a kind; `size` is in bytes per value."""
    if model is None or size is None:
        return {"flops": None, "bytes": None}
    return {
        "flops": model.flops(sums.tokens, sums.rows, sums.pairs),
        "bytes": int(size * model.values_moved(sums.steps, sums.tokens, sums.cached)),
    }


def fractions(row: Mapping[str, Any], peak: Optional[Peak]) -> dict[str, Optional[float]]:
    """Return MFU and MBU as fractions, None if a figure is not known or no call ran."""
    if peak is None or row["flops"] is None or not row["seconds"] > 0:
        return {"mfu": None, "mbu": None}
    return {
        "mfu": row["flops"] / (row["seconds"] * peak.flops),
        "mbu": row["bytes"] / (row["seconds"] * peak.bandwidth),
    }


def simulated_energy(
    work: Mapping[str, KindTotals], end: float, tokens: int, power: Optional[Mapping[str, Any]]
) -> Optional[float]:
    """Return the joules per 1,000 tokens of a run until `end`, from the power that was measured per kind of step."""
    if not power or not tokens:
        return None
    watts = {"mixed": power["prefill"], **power}
    busy = sum(sums.seconds for sums in work.values())
    joules = sum(watts[kind] * sums.seconds for kind, sums in work.items())
    return float(TOKENS * (joules + power["idle"] * max(0.0, end - busy)) / tokens)


def missing_figures(metric: str, about: Mapping[str, Any]) -> Optional[str]:
    """Return what a profile needs for a metric, None if it has it."""
    need = metric_named(metric).needs
    if not need:
        return None
    model = model_of(about)
    known = model is not None and bytes_per_value(about, model) is not None if need == "peak" else True
    return None if about.get(need) and known else HOW_TO_ADD[need]


# One sample of the device counters: seconds since the start of the run, then the counters; None: not reported.
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
        write_rows(file, [COLUMNS], rows)


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
