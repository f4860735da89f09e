"""The result of a sweep, a search or a sweep over rates as pandas frames.

Times are seconds, except metrics whose names end in _ms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Optional, TypeVar, Union

import numpy as np
import pandas as pd
from servesim.config.export import export_text
from servesim.config.layers import Tree
from servesim.config.user_code import allow_code
from servesim.core import BadInput
from servesim.core.limits import MAX_RATE, MIN_RATE, is_number
from servesim.report.figures import draw, styled_axes
from servesim.report.knobs import Knob, knob_charts, knob_curve
from servesim.report.rate_charts import over_rate, styled
from servesim.report.recorded_runs import compared_rows
from servesim.report.sweep_page import write_report
from servesim.report.trust import policy_note
from servesim.runs.request_rate import format_rate
from servesim.statistics.objective import parse_objective
from servesim.study.columns import frame_row, html_result, printed_cells
from servesim.study.compared_runs import ComparedRuns, from_row
from servesim.study.knob_table import RowSearch, knob_table, sorted_values
from servesim.study.ranking import Summary
from servesim.study.rate_summary import RateSummary
from servesim.study.rate_summary import Result as Study
from servesim.study.single_run import run_context
from servesim.study.sweep_text import capacity_rows, describe_constraints, describe_ties, top_rows
from servesim.study.table import capacity_columns, format_count, point_columns, sweep_columns
from servesim.study.verdict import verdict_of

from .compare import CompareResult, compare_runs
from .run import Result, run_scenario

TOP = 10  # configurations that a notebook shows


S = TypeVar("S", Summary, RateSummary)


@dataclass(frozen=True)
class StudyResult(Generic[S]):
    """What the results of a sweep and of a sweep over rates have in common."""

    summary: S = field(repr=False)

    @property
    def constraints(self) -> list[str]:
        """The constraints of the sweep (`subject_to`)."""
        return [str(bound) for bound in self.summary.experiment.subject_to]

    @property
    def verdict(self) -> str:
        """The result in one sentence: the winner, or why there is none."""
        return verdict_of(self.summary).text

    @property
    def winner(self) -> Optional[int]:
        """The number of the best configuration; None without one."""
        return None if self.summary.winner is None else self.summary.winner.config

    def _config(self, config: Optional[int]) -> int:
        """Return the number of a configuration (default: the winner)."""
        number, experiment = self.winner if config is None else config, self.summary.experiment
        if number is None:
            raise BadInput(f"{experiment.name}: no configuration wins by capacity; choose a number")
        if number not in range(len(experiment.configs)):
            raise BadInput(f"configuration {number}: expected a number from 0 to {len(experiment.configs) - 1}")
        return number

    def export(self, to: str, config: Optional[int] = None, model: Optional[str] = None) -> str:
        """Return a configuration (default: the winner) as command or file of vllm, sglang, mindie or llm-serving."""
        tree = self.summary.experiment.tree(self._config(config))
        return export_text(tree, to, model, self.summary.experiment.name)

    def report(self, path: Union[str, Path]) -> None:
        """Write report.html: one offline page."""
        write_report(self.summary, Path(path))


class SweepResult(StudyResult[Summary]):
    """A sweep: its configurations, the best first."""

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per configuration, best first: parameters, means, half-widths, differences from the baseline.

        `relation` is that to the winner: best, equal, undecided, worse or cannot win. `feasible` says whether all
        constraints are met, and `violation` by which fraction of the bound the worst one is missed.
        """
        columns = sweep_columns(self.summary)
        return pd.DataFrame([frame_row(columns, row) for row in self.summary.rows]).set_index("config")

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run: configuration, replication, parameters and metrics."""
        rows = [
            {"config": row.config, "replication": run["replication"], **row.assignment, **run.get("metrics", {})}
            for row in self.summary.rows
            for run in row.runs
        ]
        return pd.DataFrame(rows).sort_values(["config", "replication"], ignore_index=True)

    @property
    def pareto(self) -> pd.DataFrame:
        """The configurations on the Pareto front: no other is better in every objective."""
        return self.table[self.table.on_pareto_front]

    def knob_table(
        self,
        rows: Optional[str] = None,
        columns: Optional[str] = None,
        metric: Optional[str] = None,
        best: bool = False,
    ) -> pd.DataFrame:
        """Return a metric for the values of two parameters, as `sim table`: by default the two with the largest effect.

        The other parameters have the winner's values; with `best`, the best values for each cell.
        """
        table = knob_table(self.summary, rows, columns, metric, best)
        cells = [[np.nan if row is None else row.mean(table.metric) for row in line] for line in table.cells]
        index = pd.Index(table.row_values, name=table.row_key)
        return pd.DataFrame(cells, index=index, columns=pd.Index(table.column_values, name=table.column_key))

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
        return self.summary.experiment.scenario(self._config(config))

    def compare(
        self,
        config: Optional[int] = None,
        base: int = 0,
        metrics: Union[str, list[str], None] = None,
    ) -> CompareResult:
        """Compare a configuration (B, default: the winner) with another one (A, default: the baseline)."""
        confidence = self.summary.experiment.confidence
        return compare_runs(self.compared_runs(base), self.compared_runs(config), metrics, confidence)

    def compared_runs(self, config: Optional[int] = None) -> ComparedRuns:
        """Return the runs of a configuration (default: the winner) as a side of a comparison."""
        number = self._config(config)
        row = next(row for row in self.summary.rows if row.config == number)
        return from_row(self.summary, row, f"{self.summary.experiment.name}: {row.label}")

    def run(
        self,
        config: Optional[int] = None,
        replication: int = 0,
        decisions: bool = False,
        trust: bool = False,
    ) -> Result:
        """Repeat one run of the sweep: of the winner by default, of the baseline for `config=0`.

        Runs of the same replication serve the same requests. `decisions=True` keeps one row per scheduler step. `trust`
        is that of `servesim.run`.
        """
        task = self.summary.experiment.task(self._config(config), replication)
        with allow_code(trust):
            context = run_context(self.summary.experiment.context)
            scenario = context.scenario(task)
            return run_scenario(scenario, context.trace(scenario, task), decisions)

    def curve(self, knob: str, metric: Optional[str] = None) -> pd.DataFrame:
        """Return the metric for each value of a parameter; the default metric is the first objective.

        `best` is the best configuration with this value, `single_change` the winner with only this parameter changed.
        `_half_width` columns are half-widths of the paired differences from the winner: if the interval includes zero,
        the difference is not significant. Configurations that are not eligible are left out.
        """
        curve = self._curve(knob, metric)
        values = sorted_values(self.summary.experiment.knobs[knob])
        frame = pd.DataFrame(index=pd.Index(values, name=knob))
        for name, points in (("best", curve.best), ("single_change", curve.single_change)):
            results = {repr(point.value): point.result for point in points}
            found = [results.get(repr(value)) for value in values]
            frame[name] = [np.nan if result is None else result.mean for result in found]
            half_widths = [None if result is None else result.half_width for result in found]
            frame[f"{name}_half_width"] = pd.Series(half_widths, index=frame.index, dtype=float)
        return frame

    def _curve(self, knob: str, metric: Optional[str]) -> Knob:
        if knob not in self.knobs:
            raise BadInput(f"parameter {knob!r}: not varied in this sweep; known: {', '.join(self.knobs)}")
        objective = self.summary.experiment.objectives[0] if metric is None else parse_objective(metric)
        return knob_curve(RowSearch(self.summary, objective), knob)

    def plot(self, knob: str, metric: Optional[str] = None, axes: Any = None) -> Any:
        """Draw the curve of a parameter; return the matplotlib axes."""
        curve = self._curve(knob, metric)
        if not curve.best:
            raise BadInput(f"parameter {knob}: no configuration can win, so there is no curve")
        with styled_axes(axes) as axes:
            draw(axes, knob_charts([curve])[0])
            axes.legend()
        return axes

    def __repr__(self) -> str:
        experiment = self.summary.experiment
        return f"SweepResult({experiment.name}: {len(self.summary.rows)} configurations, {self.summary.run_count} runs)"

    def _repr_html_(self) -> str:
        cells = printed_cells(sweep_columns(self.summary), top_rows(self.summary.rows, self.summary.baseline, TOP))
        notes = [self.verdict, *describe_ties(self.summary), *describe_constraints(self.summary)]
        notes.append(
            policy_note(self.summary.experiment.tree(row.config) for row in compared_rows(self.summary).values())
        )
        size = f"{format_count(len(self.summary.rows), 'configuration')}, {format_count(self.summary.run_count, 'run')}"
        return html_result(f"{self.summary.experiment.name}: {size}", cells, notes)


class RateSweepResult(StudyResult[RateSummary]):
    """A sweep over rates: the ranking at each rate, the curves and capacities of the configurations."""

    @property
    def rates(self) -> list[float]:
        """The request rates of all configurations, in rising order; `curves` has those of a bisection too."""
        return self.summary.rates

    def at(self, rate: float) -> SweepResult:
        """Return the result at one rate."""
        if rate not in self.summary.by_rate:
            raise BadInput(f"rate {rate:g}: expected one of {', '.join(f'{known:g}' for known in self.rates)}")
        return SweepResult(self.summary.by_rate[rate])

    @cached_property
    def curves(self) -> pd.DataFrame:
        """One row per configuration and tested rate: parameters, metrics, and whether it meets the constraints."""
        columns = point_columns(self.summary)
        return pd.DataFrame([frame_row(columns, point) for curve in self.summary.curves for point in curve.points])

    @cached_property
    def capacity(self) -> pd.DataFrame:
        """One row per configuration, the highest capacity first; it needs constraints (`subject_to`)."""
        if not self.summary.experiment.subject_to:
            raise BadInput("capacity: expected constraints in the sweep (`subject_to`), got none")
        columns = capacity_columns(self.summary)
        return pd.DataFrame([frame_row(columns, curve) for curve in self.summary.curves]).set_index("config")

    @property
    def rate(self) -> Optional[float]:
        """The highest tested rate at which the winner meets the constraints; None if nothing meets them."""
        winner = self.summary.winner
        return None if winner is None or winner.capacity is None else winner.capacity.rate

    def scenario(self, config: Optional[int] = None, rate: Optional[float] = None) -> Tree:
        """Return the scenario of a configuration at a rate, as input of `servesim.run`.

        The defaults are the winner and its capacity, the highest rate that meets the constraints.
        """
        number, at = self._config(config), self.rate if rate is None else rate
        if at is None:
            raise BadInput(f"{self.summary.experiment.name}: expected a rate, because no rate meets the constraints")
        if not is_number(at, MIN_RATE, MAX_RATE):
            raise BadInput(f"rate: expected requests per second from {MIN_RATE:g} to {MAX_RATE:g}, got {at!r}")
        return self.summary.scenario(number, at)

    def plot(self, metric: Optional[str] = None, axes: Any = None, top: int = 6) -> Any:
        """Draw a metric over the rate for the best configurations and the baseline; return the matplotlib axes.

        The default metric is that of the first constraint, or the first objective. Open points miss a constraint.
        """
        chosen = self.summary.main_metric if metric is None else metric
        if chosen not in self.curves:
            raise BadInput(f"metric {chosen!r}: expected a metric of the curves: {', '.join(map(str, self.curves))}")
        shown = top_rows(self.summary.curves, self.summary.baseline, top)
        with styled_axes(axes) as axes:
            draw(axes, over_rate(styled(shown), chosen, self.summary.experiment.subject_to, "rates"))
            axes.legend()
        return axes

    def __repr__(self) -> str:
        name, rates = self.summary.experiment.name, ", ".join(f"{rate:g}" for rate in self.rates)
        return f"RateSweepResult({name}: {format_count(len(self.summary.curves), 'configuration')} at {rates} req/s)"

    def _repr_html_(self) -> str:
        sizes = {"configuration": len(self.summary.curves), "rate": len(self.rates), "run": self.summary.run_count}
        size = ", ".join(format_count(count, noun) for noun, count in sizes.items())
        title = f"{self.summary.experiment.name}: {size}"
        shown = (self.summary.curves[0], self.summary.baseline)
        note = policy_note(self.summary.experiment.tree(curve.config) for curve in shown)
        if self.constraints:
            return html_result(title, printed_cells(*capacity_rows(self.summary, TOP)), [self.verdict, note])
        results = [[format_rate(rate), self.at(rate).verdict] for rate in self.rates]
        return html_result(title, [["rate", "result"], *results], [note])


Swept = Union[SweepResult, RateSweepResult]


def frames_of(result: Study) -> Swept:
    """Return the frames of the result of a sweep or a search."""
    return RateSweepResult(result) if isinstance(result, RateSummary) else SweepResult(result)
