"""The result of a sweep, a search or a comparison as JSON; for sweeps the numbers of summary.csv and capacity.csv."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

from servesim.config.old_keys import OLD, rename_settings

from .compare import Difference, summarise
from .compared_runs import ComparedRuns
from .curves import Curve
from .files import metric_names
from .load_summary import LoadSummary, Result
from .ranking import Row, Summary
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
    if isinstance(result, LoadSummary):
        data["loads"] = [
            {"load": load, "winner": None if summary.winner is None else summary.winner.config, **ranking(summary)}
            for load, summary in result.by_load.items()
        ]
        data["capacities"] = [capacity_json(curve) for curve in result.curves if curve.capacity is not None]
        return data
    return {**data, **ranking(result)}


def ranking(summary: Summary) -> dict[str, Any]:
    """Return the configurations of a sweep, best first."""
    return {"configurations": [row_json(row, summary) for row in summary.rows]}


def row_json(row: Row, summary: Summary) -> dict[str, Any]:
    """Return one configuration."""
    objectives, others = metric_names(summary.experiment)
    metrics: dict[str, Any] = {}
    for name in objectives:
        mean, change = row.means[name], row.differences[name]
        metrics[name] = {
            "mean": number(mean.mean), "half_width": number(mean.half_width),
            "difference": number(change.mean), "difference_half_width": number(change.half_width),
        }  # fmt: skip
    metrics.update({name: {"mean": number(row.mean(name))} for name in others})
    return {
        "rank": row.rank,
        "config": row.config,
        "settings": rename_settings(row.assignment, OLD),
        "relation": row.relation.outcome,
        "feasible": row.feasible,
        "violation": row.violation,
        "on_pareto_front": row.on_pareto_front,
        "labels": list(row.labels),
        "replications": len(row.runs),
        **({"draws_won": row.draws_won} if summary.experiment.intervals else {}),
        "metrics": metrics,
    }


def capacity_json(curve: Curve) -> dict[str, Any]:
    """Return the capacity of a configuration and the rates that were tested."""
    capacity = curve.capacity
    assert capacity is not None
    return {
        "rank": curve.rank,
        "config": curve.config,
        "relation": curve.outcome,
        "capacity": capacity.rate,
        "estimate": capacity.estimate,
        "missed_at": capacity.missed_at,
        "reason": capacity.reason,
        "tested": [{"load": point.load, "meets": point.good} for point in curve.points],
    }


def number(value: Optional[float]) -> Optional[float]:
    """Return a number of JSON: null if there is none."""
    return None if value is None or math.isnan(value) else float(value)


def differences_json(
    a: ComparedRuns, b: ComparedRuns, differences: Sequence[Difference], tolerance: Optional[float]
) -> dict[str, Any]:
    """Return a comparison as JSON."""
    rows = {}
    for row in differences:
        change, relative = row.change, row.relative
        rows[row.objective.metric] = {
            "a": row.a, "b": row.b, "difference": change.mean, "half": change.half_width, "part": relative.mean,
            "part_low": relative.low, "part_high": relative.high,
            "pairs": change.n, "words": row.describe(), **({"draws": list(row.draws)} if row.draws else {}),
        }  # fmt: skip
    return {"a": a.name, "b": b.name, "figures": rows, "verdict": summarise(differences, tolerance)}
