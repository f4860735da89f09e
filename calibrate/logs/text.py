"""A fit from logs, told: the table a person reads, and the part of profile.yaml that keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from .fit import Judged, LogFit
from .observed_runs import Runs


def about(fit: LogFit, runs: Runs) -> dict[str, Any]:
    """Return what profile.yaml says beside the costs."""
    worst = [abs(judged.error) for judged in (*fit.left_out, *fit.predicted)]
    return {
        "name": runs.name,
        **runs.about,
        "error": {"makespan": max(worst)} if worst else None,
        "fit": {
            "parameters": parameters(fit),
            "cold_start": {name: {"prefill": cold[0], "decode": cold[1]} for name, cold in fit.cold.items()},
            "fitted": rows(fit.fitted),
            "left_out": rows(fit.left_out),
            "predicted": rows(fit.predicted),
        },
    }


def parameters(fit: LogFit) -> dict[str, dict[str, float]]:
    """Return the fitted numbers with their intervals."""
    found = {}
    for k, name in enumerate(fit.names):
        (low, high), value = fit.interval(k), float(fit.values[k])
        found[name] = {"value": value, "error": value * float(fit.errors[k]), "low": low, "high": high}
    return found


def rows(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return judgements as plain data."""
    told = []
    for one in judged:
        row = {"run": one.name, "measured_s": one.measured, "predicted_s": one.predicted, "error": one.error}
        if one.ttft is not None:
            row |= {"ttft_error": one.ttft, "e2e_error": one.e2e}
        told.append(row)
    return told


def table(fit: LogFit) -> str:
    """Return the parameters with their intervals, and every run with its error."""
    lines = [f"{'parameter':<26}{'value':>12}{'error':>11}   interval"]
    for name, row in parameters(fit).items():
        lines.append(f"{name:<26}{row['value']:>12.4g}{row['error']:>11.1g}   {row['low']:.4g} to {row['high']:.4g}")
    lines += ["", f"{'run':<36}{'measured':>10}{'predicted':>11}{'makespan':>10}{'ttft':>8}{'e2e':>8}"]
    groups = (("fitted", fit.fitted), ("left out", fit.left_out), ("predicted", fit.predicted))
    for title, judged in groups:
        for one in judged:
            name, errors = f"{title}: {one.name}", f"{percent(one.ttft):>8}{percent(one.e2e):>8}"
            lines.append(f"{name:<36}{one.measured:>9.1f}s{one.predicted:>10.1f}s{one.error:>+9.2%} {errors}")
    if fit.left_out:
        lines.append("left out: predicted from the other fitted runs; what only it tells of stays at its start value")
    lines.append("makespan, then medians over requests of what ttft and e2e are off by")
    return "\n".join(lines)


def percent(part: Optional[float]) -> str:
    """Return a part as percents, nothing for nothing."""
    return "" if part is None else f"{part:.1%}"
