"""The result of a sweep over rates, also that of `capacity`, as pandas frames."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Optional

import pandas as pd
from servesim.config.layers import Tree
from servesim.core import BadInput
from servesim.report.figures import plot_rates, styled_axes
from servesim.report.trust import policy_note
from servesim.runs.request_rate import format_rate
from servesim.study.columns import frame_row, html_result, printed_cells
from servesim.study.rate_summary import RateSummary, capacity_columns, capacity_rows, point_columns
from servesim.study.table import format_count
from servesim.study.verdict import top_rows

from .sweep import TOP, StudyResult, SweepResult


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
    def winner(self) -> Optional[int]:
        """The configuration with the highest capacity, None without one."""
        return None if self.summary.winner is None else self.summary.winner.config

    @property
    def rate(self) -> Optional[float]:
        """The highest tested rate at which the winner meets the constraints; None if nothing meets them."""
        winner = self.summary.winner
        return None if winner is None or winner.capacity is None else winner.capacity.rate

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        return self.summary.verdict.text

    def scenario(self, config: Optional[int] = None, rate: Optional[float] = None) -> Tree:
        """Return the scenario of a configuration at a rate, as input of `servesim.run`.

        The defaults are the winner and its capacity, the highest rate that meets the constraints.
        """
        number, at = self._config(config), self.rate if rate is None else rate
        if at is None:
            raise BadInput(f"{self.summary.experiment.name}: expected a rate, because no rate meets the constraints")
        return self.summary.scenario(number, at)

    def _config(self, config: Optional[int]) -> int:
        number = self.winner if config is None else config
        if number is None:
            raise BadInput(f"{self.summary.experiment.name}: no configuration wins by capacity; choose a number")
        return number

    def plot(self, metric: Optional[str] = None, axes: Any = None, top: int = 6) -> Any:
        """Draw a metric over the rate for the best configurations and the baseline; return the matplotlib axes.

        The default metric is that of the first constraint, or the first objective. Open points miss a constraint.
        """
        chosen = self.summary.main_metric if metric is None else metric
        if chosen not in self.curves:
            raise BadInput(f"metric {chosen!r}: expected a metric of the curves: {', '.join(map(str, self.curves))}")
        shown = top_rows(self.summary.curves, self.summary.baseline, top)
        with styled_axes(axes) as axes:
            plot_rates(axes, shown, chosen, self.summary.experiment.subject_to)
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
