"""The result of a sweep or a search, with or without rates: run or read it, write its files, print it, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from servesim.files.terminal import PLAIN, Screen

from .columns import json_row
from .executor import Executor
from .experiment import Experiment
from .pilot_runs import choose_terms
from .progress import Progress
from .ranking import Summary
from .rate_summary import RateSummary, capacity_columns, format_rate_summary, point_columns, write_rate_summary
from .rates import Curve
from .single_run import Record, RunKey
from .sweep import read_records, sweep
from .table import sweep_columns, write_summary
from .verdict import Verdict, format_table, verdict_of

Result = Union[Summary, RateSummary]


def summarise(experiment: Experiment, records: Mapping[RunKey, Record]) -> Result:
    """Return the result of an experiment."""
    return RateSummary(experiment, records) if experiment.rates else Summary(experiment, records)


def run_experiment(
    experiment: Experiment, folder: Path, executor: Executor, resume: bool, progress: Progress
) -> Result:
    """Run the missing runs of an experiment and return its result."""
    experiment = choose_terms(experiment, folder, executor)
    return summarise(experiment, sweep(experiment, folder, executor, resume, progress))


def load_result(folder: Union[str, Path]) -> Result:
    """Return the result of an experiment folder."""
    return summarise(*read_records(Path(folder)))


def verdict_of_result(result: Result) -> Verdict:
    """Return the verdict of a sweep, with or without rates."""
    return verdict_of(result) if isinstance(result, Summary) else result.verdict


def write_result(result: Result, folder: Path) -> None:
    """Write the tables and the winner; of a sweep over rates, also the curves and the capacities."""
    if isinstance(result, Summary):
        write_summary(result, folder)
    else:
        write_rate_summary(result, folder)


def format_result(result: Result, top: int = 10, screen: Screen = PLAIN) -> str:
    """Return the printed table of a sweep; over rates, that of the capacities, or of each rate without constraints."""
    if isinstance(result, Summary):
        return format_table(result, top, screen)
    return format_rate_summary(result, top, screen)


def result_json(result: Result, verdict: Verdict) -> dict[str, Any]:
    """Return the whole result; docs/sweep-keys.md describes the keys."""
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
