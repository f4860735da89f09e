"""Run a sweep with or without rates, or read its folder; and its result as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Union

from .columns import json_row
from .executor import Executor
from .experiment import Experiment
from .pilot_runs import choose_terms
from .progress import Progress
from .ranking import Summary
from .rate_summary import RateSummary, Result, summarise
from .sweep import read_records, sweep
from .table import capacity_columns, point_columns, sweep_columns
from .verdict import verdict_of


def run_experiment(
    experiment: Experiment, folder: Path, executor: Executor, resume: bool, progress: Progress
) -> Result:
    """Run the missing runs of an experiment and return its result."""
    experiment = choose_terms(experiment, folder, executor)
    return summarise(experiment, sweep(experiment, folder, executor, resume, progress))


def load_result(folder: Union[str, Path]) -> Result:
    """Return the result of an experiment folder."""
    return summarise(*read_records(Path(folder)))


def result_json(result: Result) -> dict[str, Any]:
    """Return the whole result; docs/sweep-keys.md describes the keys."""
    experiment, verdict = result.experiment, verdict_of(result)
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
        columns = [column for column in point_columns(result) if column.name != "config" and column.group != "settings"]
        capacity, curves = capacity_columns(result), result.curves if experiment.subject_to else ()
        data["capacities"] = [
            {**json_row(capacity, curve), "tested": [json_row(columns, point) for point in curve.points]}
            for curve in curves
        ]
        return data
    return {**data, **ranking(result)}


def ranking(summary: Summary) -> dict[str, Any]:
    """Return the configurations of a sweep, best first."""
    columns = sweep_columns(summary)
    return {"configurations": [json_row(columns, row) for row in summary.rows]}
