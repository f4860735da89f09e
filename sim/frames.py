"""Results of a sweep or a replay as pandas frames; run_frames.py has those of one run.

Times are seconds, except metrics whose names end in _ms. Frames of requests are indexed by request id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import pandas as pd
from servesim.config.old_keys import NEW, rename_path
from servesim.config.overrides import Tree
from servesim.config.user_code import allow_code
from servesim.core import BadInput, Shape
from servesim.engine.step import ModelCall
from servesim.report.page import write_report
from servesim.study.files import CSV_METRICS
from servesim.study.intervals import Interval
from servesim.study.number_format import format_mean
from servesim.study.objective import parse_objective
from servesim.study.ranking import Row, Summary
from servesim.study.single_run import RunContext

from .run_frames import Result, result_of, run_scenario

if TYPE_CHECKING:
    from servesim.calibrate.replay.replay import ReplayedScenario
    from servesim.calibrate.replay.verify import Comparison
    from servesim.costs.device_profile import Profile

SAME_WITHIN = 0.0005  # values of a parameter whose metrics differ by less, relative to the best, count as equal
OLD_CURVE = {"alone": "single_change", "alone_half": "single_change_half"}  # old column names of a curve


class Curve(pd.DataFrame):
    """The frame of a curve; its old column names still work."""

    alone = property(lambda self: self["single_change"])
    alone_half = property(lambda self: self["single_change_half"])

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(OLD_CURVE.get(key, key) if isinstance(key, str) else key)


@dataclass(frozen=True)
class SweepResult:
    """A sweep: its configurations, the best first."""

    summary: Summary = field(repr=False)
    found = property(lambda self: self.summary)  # old name

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per configuration, best first: parameters, means, half-widths, differences from the baseline."""
        return pd.DataFrame([self._table_row(row) for row in self.summary.rows]).set_index("config")

    def _table_row(self, row: Row) -> dict[str, Any]:
        facts = {"config": row.config, "rank": row.rank, "labels": ", ".join(row.labels), "eligible": row.eligible}
        objectives: dict[str, Any] = {}
        for metric, mean in row.means.items():
            change = row.differences[metric]
            objectives |= {metric: mean.mean, f"{metric}_half": mean.half_width}
            objectives |= {f"{metric}_diff": change.mean, f"{metric}_diff_half": change.half_width}
        others = {name: row.mean(name) for name in CSV_METRICS if name not in row.means}
        facts |= {"on_front": row.on_pareto_front, "tied": row.not_significant}
        facts |= {"draws_won": row.draws_won} if self.summary.experiment.intervals else {}
        return {**facts, **row.assignment, **objectives, **others}

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run: configuration, replication, parameters and metrics."""
        rows = [
            {"config": row.config, "replication": run["replication"], **row.assignment, **run.get("figures", {})}
            for row in self.summary.rows
            for run in row.runs
        ]
        return pd.DataFrame(rows).sort_values(["config", "replication"], ignore_index=True)

    @property
    def pareto(self) -> pd.DataFrame:
        """The configurations on the Pareto front: no other is better in every objective."""
        return self.table[self.table.on_front]

    @property
    def knobs(self) -> list[str]:
        """The parameters that take more than one value."""
        return list(self.summary.experiment.knobs)

    @property
    def winner(self) -> int:
        """The number of the best eligible configuration."""
        if self.summary.winner is None:
            raise BadInput(f"sweep {self.summary.experiment.name}: no configuration is eligible")
        return self.summary.winner.config

    def scenario(self, config: Optional[int] = None) -> Tree:
        """Return the scenario of a configuration (default: the winner), as input of `servesim.run`."""
        return self.summary.experiment.tree(self.winner if config is None else config)

    def run(
        self,
        config: Optional[int] = None,
        replication: int = 0,
        decisions: bool = False,
        turns: bool = False,
        trust: bool = False,
    ) -> Result:
        """Repeat one run of the sweep: of the winner by default, of the baseline for `config=0`.

        Runs of the same replication serve the same requests. `decisions=True` keeps one row per scheduler step (`turns`
        is its old name). `trust` is that of `servesim.run`.
        """
        task = self.summary.experiment.task(self.winner if config is None else config, replication)
        with allow_code(trust):
            return run_scenario(RunContext(self.summary.experiment.base).scenario(task), None, decisions or turns)

    def curve(self, knob: str, metric: Optional[str] = None) -> pd.DataFrame:
        """Return the metric for each value of a parameter; the default metric is the first objective.

        `best` is the best configuration with this value, `single_change` the winner with only this parameter changed.
        `_half` columns are half-widths of the paired differences from the winner: if the interval includes zero, the
        difference is not significant. Configurations that are not eligible are left out.
        """
        knob = rename_path(knob, NEW)[0]
        if knob not in self.knobs:
            raise BadInput(f"parameter {knob!r}: not varied in this sweep; known: {', '.join(self.knobs)}")
        objective = parse_objective(self.summary.experiment.objectives[0].metric if metric is None else metric)
        winner = self.summary.rows[0].assignment
        points = {}
        for value in self.summary.experiment.knobs[knob]:
            matching = [row for row in self.summary.rows if row.eligible and row.assignment.get(knob) == value]
            best = min(matching, key=lambda row: objective.sign * row.mean(objective.metric), default=None)
            single = next((row for row in matching if row.assignment == {**winner, knob: value}), None)
            columns = self._point("best", best, objective.metric)
            points[value] = {**columns, **self._point("single_change", single, objective.metric)}
        frame = pd.DataFrame.from_dict(points, orient="index").rename_axis(knob)
        numbers = all(type(value) in (int, float) for value in points)
        return Curve(frame.sort_index() if numbers else frame)

    def describe_curve(self, knob: str, metric: Optional[str] = None) -> str:
        """Return a curve as a sentence: the best and the worst value of a parameter."""
        knob = rename_path(knob, NEW)[0]
        metric = self.summary.experiment.objectives[0].metric if metric is None else metric
        best = self.curve(knob, metric).best.dropna()
        if best.empty:
            return f"{metric} is unknown for every value of {knob}."
        order = best.sort_values(ascending=parse_objective(metric).goal == "min", kind="stable")
        first, last = order.iloc[0], order.iloc[-1]
        difference = abs(last - first) / abs(first) if first else float(last != first)
        if difference < SAME_WITHIN:
            return f"{metric} is {format_metric(first, metric)} for every value of {knob}."
        worse = f"{difference:.1%} worse" if difference < 1 else f"{1 + difference:.1f} times as much"
        return (
            f"{metric} is best with {knob} {order.index[0]} ({format_metric(first, metric)}) and worst with "
            f"{order.index[-1]} ({format_metric(last, metric)}, {worse})."
        )

    sentence = describe_curve  # old name

    def _point(self, name: str, row: Optional[Row], metric: str) -> dict[str, float]:
        winner = self.summary.winner
        if row is None or winner is None:
            return {name: np.nan, f"{name}_half": np.nan}
        half = self.summary.difference(row, winner, metric).half_width
        return {name: row.mean(metric), f"{name}_half": np.nan if half is None else half}

    def report(self, path: Union[str, Path]) -> None:
        """Write report.html: one offline page."""
        write_report(self.summary, Path(path))

    def __repr__(self) -> str:
        experiment = self.summary.experiment
        return f"SweepResult({experiment.name}: {len(self.summary.rows)} configurations, {self.summary.run_count} runs)"


@dataclass(frozen=True)
class ReplayResult:
    """One scenario, simulated and measured."""

    name: str
    simulated: Result
    measured: Result
    comparison: Comparison = field(repr=False)
    profile: Profile = field(repr=False)  # step costs of the simulation, with host overhead
    calls: Sequence[ModelCall] = field(default=(), repr=False)

    @cached_property
    def errors(self) -> pd.DataFrame:
        """One row per metric: both values, the error, and its parts from step times and from decisions."""
        rows = {line.metric: line.as_dict() for line in self.comparison.rows}
        return pd.DataFrame.from_dict(rows, orient="index").astype(float).rename_axis("metric")

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request that finished in both runs: simulated and measured latencies."""
        names = ["ttft", "tpot", "e2el"]
        sides = {"simulated": self.simulated.requests, "measured": self.measured.requests}
        done = {name: side[side.outcome == "finished"] for name, side in sides.items()}
        keyed = {name: side.set_index(side.index.map(str)) for name, side in done.items()}
        latencies: list[pd.DataFrame | pd.Series[Any]] = [
            side[names].add_suffix(f"_{name}") for name, side in keyed.items()
        ]
        return keyed["measured"][["arrival", "prompt", "output"]].join(latencies, how="inner")

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per measured model call: times, measured and predicted seconds, and step shape."""
        columns = ["start", "called", "end", *Shape._fields]
        frame = pd.DataFrame([call.flat() for call in self.calls], columns=columns)
        shapes = [call.shape for call in self.calls]
        frame["seconds"] = frame.end - frame.start
        frame["predicted"] = [self.profile.cost.seconds(shape) for shape in shapes]
        frame["kind"] = [shape.kind for shape in shapes]
        return frame

    def __repr__(self) -> str:
        error, makespan = self.comparison.row("makespan").error, self.measured.metrics["makespan"]
        return f"ReplayResult({self.name}: makespan {makespan:.2f} s, simulated {error or 0:+.2%})"


def format_metric(value: float, metric: str) -> str:
    """Return a metric with its unit."""
    return format_mean(Interval(value, None, 1), metric)


def replay_of(replayed: ReplayedScenario) -> ReplayResult:
    """Return a replay as frames."""
    assert replayed.run is not None
    assert replayed.simulated is not None
    assert replayed.comparison is not None
    simulated = result_of(replayed.run, replayed.simulated.decisions)
    measured = result_of(replayed.live, replayed.live.decisions or None)
    calls = replayed.live.model_calls
    return ReplayResult(replayed.name, simulated, measured, replayed.comparison, replayed.run.profile, calls)


Sweep, Replay = SweepResult, ReplayResult  # old names
