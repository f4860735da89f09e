"""Utilisation of the device in a run: MFU, MBU and energy.

MFU (model FLOPs utilisation) is the FLOPs of the model over those of the device at its peak, in the time of the model
calls. MBU (memory-bandwidth utilisation) is the same for bytes of memory. They use the same sums in simulated and
measured runs. Energy is in joules per 1,000 generated tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from servesim.costs.model_arithmetic import Model, bytes_per_value, model_of
from servesim.costs.peak import Peak, peak_of
from servesim.engine.work_totals import KindTotals

TOKENS = 1000  # the energy is that of this many generated tokens
HOW_TO_ADD = {
    "peak": "expected `peak` in the profile (flops, bandwidth, source), a known `dtype`, and a known `model` or its "
    "sizes",
    "power": "expected `power` in the profile (watts: idle, prefill, decode); "
    "`sim calibrate probe` measures it if nvidia-smi or npu-smi is available",
}  # fmt: skip
NEEDS = {"mfu": "peak", "mbu": "peak", "energy": "power"}  # metric -> what a profile needs for it


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


def arithmetic(sums: KindTotals, model: Optional[Model], size: Optional[int]) -> dict[str, Optional[int]]:
    """Return the FLOPs and bytes of all steps of a kind; `size` is in bytes per value."""
    if model is None or size is None:
        return {"flops": None, "bytes": None}
    return {
        "flops": model.flops(sums.tokens, sums.rows, sums.pairs),
        "bytes": size * model.values_moved(sums.steps, sums.tokens, sums.cached),
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
    """Return what a profile needs for a metric of this module, None if it has it."""
    need = NEEDS.get(metric)
    if need is None:
        return None
    model = model_of(about)
    known = model is not None and bytes_per_value(about, model) is not None if need == "peak" else True
    return None if about.get(need) and known else HOW_TO_ADD[need]
