"""The files of a search for the highest rate, rates.csv, rates.png and best.yaml, and its result as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from servesim.config.old_keys import OLD, rename_keys
from servesim.config.paths import relative_paths
from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.files.write import csv_writer, open_text, save_figure, write_yaml
from servesim.runs.request_rate import scenario_at_rate
from servesim.statistics.objective import METRICS, unit
from servesim.study.result_json import number

from .capacity import CapacitySearch, Trial


def write_rates(search: CapacitySearch, folder: Path) -> None:
    """Write every rate that was tried with its metrics, as a table and as a chart."""
    rows = rate_rows(search)
    with open_text(folder / "rates.csv") as file:
        writer = csv_writer(file)
        writer.writerow(rows[0])
        for row in rows:
            writer.writerow([int(cell) if isinstance(cell, bool) else cell for cell in row.values()])
    plot_rates(search, folder / "rates.png")


def rate_rows(search: CapacitySearch) -> list[dict[str, Any]]:
    """Return one row per rate that was tried, in rising order; metrics that a failed run lacks are None."""
    trials = sorted(search.trials, key=lambda trial: trial.rate)
    names = [name for name in METRICS if any(name in trial.metrics for trial in trials)]
    rows = []
    for trial in trials:
        missed = "; ".join(map(str, trial.missed))
        row = {"rate": trial.rate, "meets": trial.good, "missed": missed, "failure": trial.failure or ""}
        for name in names:
            value = trial.metrics.get(name)
            row[name] = None if value is None else value.mean
            row[f"{name}_half"] = None if value is None else value.half_width or 0.0
        rows.append(row)
    return rows


def capacity_json(search: CapacitySearch, best: Optional[Trial]) -> dict[str, Any]:
    """Return the highest rate and all rates that were tried, with the numbers of rates.csv."""
    trials = sorted(search.trials, key=lambda trial: trial.rate)
    rates = [
        {
            "rate": trial.rate,
            "meets": trial.good,
            "missed": [str(bound) for bound in trial.missed],
            "failure": trial.failure,
            "metrics": {
                name: {"mean": number(value.mean), "half_width": number(value.half_width)}
                for name, value in trial.metrics.items()
            },
        }
        for trial in trials
    ]
    bounds = [str(bound) for bound in search.bounds]
    return {"bounds": bounds, "highest_rate": None if best is None else best.rate, "rates": rates}


def plot_rates(search: CapacitySearch, path: Path) -> None:
    """Draw every bounded metric over the rate, with its bound."""
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(bound.metric for bound in search.bounds))
    with matplotlib_style():
        figure = Figure(figsize=(7, 3 * len(metrics)))
        for axes, metric in zip(figure.subplots(len(metrics), squeeze=False)[:, 0], metrics):
            plot_metric(axes, metric, search)
        save_figure(figure, path, dpi=120)


def plot_metric(axes: Any, metric: str, search: CapacitySearch) -> None:
    """Draw one metric over the rate, with its bounds."""
    trials = sorted(search.trials, key=lambda trial: trial.rate)
    points = [(trial.rate, trial.metrics[metric].mean, trial.good) for trial in trials if metric in trial.metrics]
    rates, values = [point[0] for point in points], [point[1] for point in points]
    axes.plot(rates, values, color=LIGHT["point"], zorder=1)
    for good, colour, label in ((True, "front", "meets the bounds"), (False, "limit", "misses a bound")):
        chosen = [point for point in points if point[2] is good]
        axes.scatter([p[0] for p in chosen], [p[1] for p in chosen], color=LIGHT[colour], label=label, zorder=2)
    for bound in [bound for bound in search.bounds if bound.metric == metric]:
        axes.axhline(bound.value, color=LIGHT["limit"], linestyle="--", linewidth=1, label=str(bound))
    axes.set(xlabel="requests per second", ylabel=axis_name(metric))
    axes.set_xscale("log" if spans_decade(rates) else "linear")
    axes.set_yscale("log" if spans_decade(values) else "linear")
    axes.legend()


def axis_name(metric: str) -> str:
    """Return a metric with its unit, if its name does not have it."""
    return metric if metric.endswith("_ms") or not unit(metric) else f"{metric} ({unit(metric)})"


def spans_decade(values: Sequence[float]) -> bool:
    """Whether an axis needs a logarithmic scale."""
    return bool(values) and 0 < 10 * min(values) <= max(values)


def write_best_rate(search: CapacitySearch, best: Trial, path: Path) -> bool:
    """Write the scenario at the highest rate; return whether its workload has a key for the rate."""
    scenario = scenario_at_rate(search.tree, best.rate, best.factor)
    if scenario is not None:
        write_yaml(path, rename_keys(relative_paths(scenario, path.parent), OLD))
    return scenario is not None
