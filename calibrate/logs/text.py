"""Printed table and profile.yaml of a fit from logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from .fit import LogFit, RunError
from .observed_runs import Runs


def profile_about(fit: LogFit, runs: Runs) -> dict[str, Any]:
    """Return the keys of profile.yaml besides the costs."""
    errors = [abs(run.error) for run in (*fit.left_out, *fit.predicted)]
    return {
        "name": runs.name,
        **runs.about,
        "error": {"makespan": max(errors)} if errors else None,
        "fit": {
            "parameters": parameters(fit),
            "cold_start": {name: {"prefill": cold[0], "decode": cold[1]} for name, cold in fit.cold.items()},
            "fitted": rows(fit.fitted),
            "left_out": rows(fit.left_out),
            "predicted": rows(fit.predicted),
        },
    }


def parameters(fit: LogFit) -> dict[str, dict[str, float]]:
    """Return the fitted parameters with their intervals."""
    by_name = {}
    for k, name in enumerate(fit.names):
        (low, high), value = fit.interval(k), float(fit.values[k])
        by_name[name] = {"value": value, "error": value * float(fit.errors[k]), "low": low, "high": high}
    return by_name


def rows(runs: Sequence[RunError]) -> list[dict[str, Any]]:
    """Return the errors of runs as plain data."""
    data = []
    for run in runs:
        row = {"run": run.name, "measured_s": run.measured, "predicted_s": run.predicted, "error": run.error}
        if run.ttft is not None:
            row |= {"ttft_error": run.ttft, "e2e_error": run.e2e}
        data.append(row)
    return data


def format_table(fit: LogFit) -> str:
    """Return the parameters with their intervals, and every run with its error, as text."""
    lines = [f"{'parameter':<26}{'value':>12}{'error':>11}   interval"]
    for name, row in parameters(fit).items():
        lines.append(f"{name:<26}{row['value']:>12.4g}{row['error']:>11.1g}   {row['low']:.4g} to {row['high']:.4g}")
    lines += ["", f"{'run':<36}{'measured':>10}{'predicted':>11}{'makespan':>10}{'ttft':>8}{'e2e':>8}"]
    groups = (("fitted", fit.fitted), ("left out", fit.left_out), ("predicted", fit.predicted))
    for title, runs in groups:
        for run in runs:
            name, errors = f"{title}: {run.name}", f"{format_percent(run.ttft):>8}{format_percent(run.e2e):>8}"
            lines.append(f"{name:<36}{run.measured:>9.1f}s{run.predicted:>10.1f}s{run.error:>+9.2%} {errors}")
    if fit.left_out:
        lines.append(
            "left out: predicted by a fit to the other runs; parameters that only this run shows keep their start value"
        )
    lines.append("makespan: signed error; ttft and e2e: median absolute error over requests")
    return "\n".join(lines)


def format_percent(fraction: Optional[float]) -> str:
    """Return a fraction in percent; empty for None."""
    return "" if fraction is None else f"{fraction:.1%}"
