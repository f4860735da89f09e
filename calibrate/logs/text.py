"""Printed table and profile.yaml of a fit from logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from servesim.costs.uncertainty import MODEL_SPREAD, TTFT_SPREAD, has_parameters
from servesim.costs.uncertainty import parameters as numbers_of

from .fit import LogFit, RunError
from .observed_runs import Runs

NO_FRONT_END = (
    "front end: not fitted, its time counts as step time; add front_end.seconds and front_end.per_token to free"
)


def profile_about(fit: LogFit, runs: Runs) -> dict[str, Any]:
    """Return the keys of profile.yaml besides the costs."""
    draws = []
    if has_parameters(fit.cost):
        numbers = ([float(f"{value:.4g}") for value in numbers_of(cost)] for cost in fit.draws)
        draws = [draw for draw in numbers if min(draw) >= 0]  # the curve of a random cost model may fall
    return {
        "name": runs.name,
        **runs.about,
        **({"front_end": fit.front_end} if fit.front_end else {}),
        "error": held_out_errors(fit.predicted or fit.left_out) or None,  # runs that no fit has seen count, if any
        "grid": fit.grid or None,
        "uncertainty": {"session": MODEL_SPREAD, "ttft": TTFT_SPREAD, "draws": draws},
        "fit": {
            "parameters": parameters(fit),
            **({"front_end": fit.front_end_findings} if fit.front_end_findings else {}),
            "cold_start": {name: {"prefill": cold[0], "decode": cold[1]} for name, cold in fit.cold.items()},
            "fitted": rows(fit.fitted),
            "left_out": rows(fit.left_out),
            "predicted": rows(fit.predicted),
        },
    }


def held_out_errors(runs: Sequence[RunError]) -> dict[str, dict[str, float]]:
    """Return the mean and the largest error of the makespan and of each latency over runs that were predicted."""
    errors: dict[str, list[float]] = {}
    for run in runs:
        named = {"makespan": run.error, "ttft": run.ttft, "e2e": run.e2e}
        named |= {name: predicted / measured - 1 for name, (measured, predicted) in run.figures.items()}
        for name, error in named.items():
            if error is not None:
                errors.setdefault(name, []).append(abs(error))
    return {name: {"mean": sum(e) / len(e), "max": max(e), "points": len(e)} for name, e in errors.items()}


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
        row: dict[str, Any] = {"run": run.name, "measured_s": run.measured, "predicted_s": run.predicted}
        row["error"] = run.error
        if run.ttft is not None:
            row |= {"ttft_error": run.ttft, "e2e_error": run.e2e}
        if run.figures:
            for key, name in (("ttft_error", "mean_ttft_ms"), ("e2e_error", "mean_e2el_ms")):
                if name in run.figures and key not in row:  # `sim calibrate check` shows large ones
                    row[key] = abs(run.figures[name][1] / run.figures[name][0] - 1)
            row["reported"] = {name: {"measured": m, "predicted": p} for name, (m, p) in run.figures.items()}
        data.append(row)
    return data


def format_table(fit: LogFit) -> str:
    """Return the parameters with their intervals, and every run with its error, as text."""
    width = max(26, *(len(name) + 2 for name in fit.names))
    lines = [f"{'parameter':<{width}}{'value':>12}{'error':>11}   interval"]
    for name, row in parameters(fit).items():
        lines.append(
            f"{name:<{width}}{row['value']:>12.4g}{row['error']:>11.1g}   {row['low']:.4g} to {row['high']:.4g}"
        )
    lines += fit.front_end_findings if fit.front_end else [NO_FRONT_END]
    lines += ["", f"{'run':<36}{'measured':>10}{'predicted':>11}{'makespan':>10}{'ttft':>8}{'e2e':>8}"]
    groups = (("fitted", fit.fitted), ("left out", fit.left_out), ("predicted", fit.predicted))
    for title, runs in groups:
        for run in runs:
            name, errors = f"{title}: {run.name}", f"{format_percent(run.ttft):>8}{format_percent(run.e2e):>8}"
            if run.measured is not None and run.error is not None:
                lines.append(f"{name:<36}{run.measured:>9.1f}s{run.predicted:>10.1f}s{run.error:>+9.2%} {errors}")
            lines += [
                f"{f'{name} {figure}':<36} {measured:>8.1f}ms{predicted:>9.1f}ms{predicted / measured - 1:>+8.2%}"
                for figure, (measured, predicted) in run.figures.items()
            ]
    if fit.left_out:
        lines.append(
            "left out: predicted by a fit to the other runs; parameters that only this run shows keep their start value"
        )
    lines.append("makespan and reported figures: signed error; ttft and e2e: median absolute error over requests")
    return "\n".join(lines)


def format_percent(fraction: Optional[float]) -> str:
    """Return a fraction in percent; empty for None."""
    return "" if fraction is None else f"{fraction:.1%}"
