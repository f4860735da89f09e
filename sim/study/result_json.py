"""The result of a sweep or a search as JSON: the numbers of summary.csv and capacity.csv."""

from __future__ import annotations

from typing import Any

from .columns import json_row
from .ranking import Summary
from .rate_summary import RateSummary, Result, capacity_columns, point_columns
from .rates import Curve
from .table import sweep_columns
from .verdict import Verdict


def result_json(result: Result, verdict: Verdict) -> dict[str, Any]:
    """Return the whole result; docs/sweeps.md describes the keys."""
    experiment = result.experiment
    data: dict[str, Any] = {
        "name": experiment.name,
        "verdict": verdict.kind,
        "text": verdict.text,
        "winner": None if result.winner is None else result.winner.config,
        "baseline": result.baseline.config,
        "objectives": [objective.metric for objective in experiment.objectives],
        "constraints": [str(bound) for bound in experiment.subject_to],
        "runs": result.run_count,
        "failures": [{"config": run["config"], "error": run["error"]} for run in result.failures],
    }
    if isinstance(result, RateSummary):
        data["rates"] = [
            {"rate": rate, "winner": None if summary.winner is None else summary.winner.config, **ranking(summary)}
            for rate, summary in result.by_rate.items()
        ]
        data["capacities"] = [capacity_json(result, curve) for curve in result.curves if experiment.subject_to]
        return data
    return {**data, **ranking(result)}


def ranking(summary: Summary) -> dict[str, Any]:
    """Return the configurations of a sweep, best first."""
    columns = sweep_columns(summary)
    return {"configurations": [json_row(columns, row) for row in summary.rows]}


def capacity_json(result: RateSummary, curve: Curve) -> dict[str, Any]:
    """Return the capacity of a configuration and the rates that were tested."""
    columns = [column for column in point_columns(result) if column.name != "config" and column.group != "settings"]
    tested = [json_row(columns, point) for point in curve.points]
    return {**json_row(capacity_columns(result), curve), "tested": tested}
