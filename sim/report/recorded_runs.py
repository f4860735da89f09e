"""The configurations that a page compares: baseline, and winner or the one nearest to the constraints.

They run again with more records: queues over time, and latencies of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
from servesim.core import BadInput
from servesim.runs.limit import limit_of
from servesim.runs.metrics import Metrics
from servesim.runs.simulate import simulate
from servesim.runs.timeline import QueueLog
from servesim.study.ranking import Row, Summary
from servesim.study.rate_summary import RateSummary
from servesim.study.single_run import RunContext
from servesim.study.verdict import verdict_of

MAX_REQUESTS = 5000  # only the first requests run again
QUANTILES = np.linspace(0, 1, 201)
Roles = Mapping[str, Row]  # winner, nearest or baseline -> configuration
COLOURS = {"winner": "@winner", "nearest": "@front", "baseline": "@baseline"}


def leader(summary: Summary) -> Optional[Row]:
    """Return the winner; without one, the configuration nearest to the constraints, or None."""
    return verdict_of(summary).nearest if summary.winner is None else summary.winner


def compared_rows(summary: Summary) -> dict[str, Row]:
    """Return the leader and the baseline by their roles; only the baseline if nothing beats it."""
    first = leader(summary)
    rows = {"baseline": summary.baseline}
    if first is None or first is summary.baseline:
        return rows
    return {"winner" if first is summary.winner else "nearest": first, **rows}


def roles_at_rate(result: RateSummary, rate: float) -> dict[str, Row]:
    """Return the winner by capacity and the baseline, with their results at one rate."""
    summary = result.by_rate[rate]
    if result.winner is None:
        return compared_rows(summary)
    rows = {row.config: row for row in summary.rows}
    winner = {} if result.winner.is_baseline else {"winner": rows[result.winner.config]}
    return {**winner, "baseline": summary.baseline}


@dataclass(frozen=True)
class RecordedRun:
    """A run with the states of its server over time."""

    role: str
    log: QueueLog
    requests: int = 0
    latencies: Mapping[str, Sequence[float]] = field(default_factory=dict)  # quantiles in seconds
    limit: str = ""  # what limits the run, as a sentence


def record_runs(summary: Summary, roles: Roles) -> list[RecordedRun]:
    """Run the compared configurations again; empty if their requests or policies cannot be loaded."""
    rows = {role: row for role, row in roles.items() if "failed" not in row.labels}
    context = RunContext(summary.experiment.base, length=summary.experiment.length)
    try:
        return [record_run(summary, role, row, context) for role, row in rows.items()]
    except BadInput:
        return []


def record_run(summary: Summary, role: str, row: Row, context: RunContext) -> RecordedRun:
    """Run the first replication of one configuration with a log of its queues."""
    task = summary.experiment.task(row.config, 0)._replace(max_requests=MAX_REQUESTS)
    scenario, log = context.scenario(task), QueueLog()
    trace = context.trace(scenario, task)
    run = simulate(scenario, trace, [log], profile=context.profile(scenario))
    return RecordedRun(role, log, len(trace), latency_quantiles(run.measures), limit_of(run).text)


def latency_quantiles(measures: Metrics) -> dict[str, Sequence[float]]:
    """Return the quantiles of TTFT, TPOT and E2E latency of the finished requests, in seconds."""
    latencies = {"ttft": measures.ttft, "tpot": measures.tpot, "e2el": measures.e2el}
    return {name: np.quantile(values, QUANTILES).tolist() for name, values in latencies.items() if len(values)}
