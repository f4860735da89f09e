"""The configurations that a page compares: baseline, and winner or the one nearest to the constraints.

They run again with more records: queues over time, latencies of requests, and step shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
from servesim.core import BadInput, Request
from servesim.costs.device_profile import Profile
from servesim.engine.rules import EngineRules, rules_of
from servesim.engine.server import Server
from servesim.engine.shape import Padding, step_shape
from servesim.engine.step import Step
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


class StepRange:
    """Counts the model calls, and those whose shape is larger than the measured range of a profile."""

    def __init__(self, profile: Profile, padding: Padding, rules: EngineRules) -> None:
        self.profile, self.padding, self.rules = profile, padding, rules
        self.calls = self.outside = 0

    def on_step_start(self, server: Server, step: Step, arrived: Sequence[Request]) -> None:
        if step.runs_model:
            self.calls += 1
            shape = step_shape(step, self.padding, self.rules)
            row_context = shape.context / max(1, shape.decode_live)
            self.outside += bool(self.profile.outside_range({**shape._asdict(), "context_per_row": row_context}))

    def on_step_end(self, server: Server, step: Step, now: float, finished: Sequence[Request]) -> None:
        pass


@dataclass(frozen=True)
class RecordedRun:
    """The first replication of one configuration."""

    role: str  # winner, nearest or baseline
    row: Row
    log: QueueLog
    requests: int
    profile: Profile
    latencies: Mapping[str, Sequence[float]] = field(default_factory=dict)  # name: quantiles in seconds
    limit: str = ""  # what limits the run, as a sentence
    outside: Optional[float] = None  # fraction of the model calls outside the measured range; None: no range is known


def record_runs(summary: Summary, roles: Roles) -> list[RecordedRun]:
    """Run the compared configurations again; empty if their requests or policies cannot be loaded."""
    rows = {role: row for role, row in roles.items() if "failed" not in row.labels}
    context = RunContext(summary.experiment.base, length=summary.experiment.length)
    try:
        return [record_run(summary, role, row, context) for role, row in rows.items()]
    except BadInput:
        return []


def record_run(summary: Summary, role: str, row: Row, context: RunContext) -> RecordedRun:
    """Run one configuration with a log of its queues, and count steps outside the profile if there are any."""
    task = summary.experiment.task(row.config, 0)._replace(max_requests=MAX_REQUESTS)
    scenario = context.scenario(task)
    trace, profile = context.trace(scenario, task), context.profile(scenario)
    log, steps = QueueLog(), None
    if "outside profile" in row.labels:
        policy = scenario.make_policy()
        padding = Padding(scenario.engine.prefill_buckets, scenario.decode_buckets(policy))
        steps = StepRange(profile, padding, rules_of(policy))
    run = simulate(scenario, trace, [log, *([steps] if steps else [])], profile=profile)
    outside = None if not profile.about.get("grid") else steps.outside / max(1, steps.calls) if steps else 0.0
    return RecordedRun(
        role, row, log, len(trace), profile, latency_quantiles(run.measures), limit_of(run).text, outside
    )


def latency_quantiles(measures: Metrics) -> dict[str, Sequence[float]]:
    """Return the quantiles of TTFT, TPOT and E2E latency of the finished requests, in seconds."""
    latencies = {"TTFT": measures.ttft, "TPOT": measures.tpot, "E2E latency": measures.e2el}
    return {name: np.quantile(values, QUANTILES).tolist() for name, values in latencies.items() if len(values)}
