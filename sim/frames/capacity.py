"""The highest request rate that meets bounds, with all rates that were tried, as a pandas frame."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

import pandas as pd
from servesim.config.export import export_text
from servesim.config.overrides import Tree
from servesim.core import BadInput
from servesim.report.capacity_page import write_capacity_report
from servesim.runs.request_rate import format_rate, scenario_at_rate
from servesim.searches.capacity import CapacitySearch, Trial, describe_result, trial_cells
from servesim.searches.rate_files import plot_metric, rate_rows, write_best_rate, write_rates
from servesim.statistics.constraints import describe_bounds

from .html import html_result
from .plots import styled_axes


@dataclass(frozen=True)
class CapacityResult:
    """The capacity of a scenario: the highest tested rate that meets all bounds."""

    search: CapacitySearch = field(repr=False)
    best: Optional[Trial] = field(repr=False)
    name: str = "scenario"

    @property
    def rate(self) -> Optional[float]:
        """The highest rate in requests per second; None if no tested rate meets the bounds."""
        return None if self.best is None else self.best.rate

    @cached_property
    def rates(self) -> pd.DataFrame:
        """One row per tested rate, in rising order: whether it meets the bounds, and its metrics with half-widths."""
        return pd.DataFrame(rate_rows(self.search)).set_index("rate")

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        text = "; ".join(describe_result(self.search, self.best))
        return f"{text[0].upper()}{text[1:]}."

    def scenario(self) -> Tree:
        """Return the scenario at the highest rate, as input of `servesim.run`."""
        best = self._found()
        tree = scenario_at_rate(self.search.tree, best.rate, best.factor)
        if tree is None:
            raise BadInput(f"{self.name}: its workload has no key for the request rate")
        return tree

    def export(self, to: str, model: str = "MODEL") -> str:
        """Return the command or the configuration of a real server: vllm, sglang or llm-serving."""
        return export_text(self.search.tree, to, model, self.name)

    def plot(self, metric: Optional[str] = None, axes: Any = None) -> Any:
        """Draw a metric over the rate, with its bounds; the default is that of the first bound. Return the axes."""
        known = list(dict.fromkeys(name for trial in self.search.trials for name in trial.metrics))
        chosen = self.search.bounds[0].metric if metric is None else metric
        if chosen not in known:
            raise BadInput(f"metric {chosen!r}: expected a metric of the runs: {', '.join(known)}")
        with styled_axes(axes) as axes:
            plot_metric(axes, chosen, self.search)
        return axes

    def report(self, path: Union[str, Path]) -> None:
        """Write report.html: one offline page."""
        write_capacity_report(self.search, self.best, self.name, Path(path))

    def save(self, folder: Union[str, Path]) -> None:
        """Write rates.csv, rates.png, report.html, and best.yaml if a rate meets the bounds."""
        folder = Path(folder)
        write_rates(self.search, folder)
        if self.best is not None:
            write_best_rate(self.search, self.best, folder / "best.yaml")
        self.report(folder / "report.html")

    def _found(self) -> Trial:
        if self.best is None:
            raise BadInput(f"{self.name}: no tested rate meets {describe_bounds(self.search.bounds)}")
        return self.best

    def __repr__(self) -> str:
        rate = "no rate" if self.best is None else format_rate(self.best.rate)
        bounds, tried = describe_bounds(self.search.bounds), len(self.search.trials)
        return f"CapacityResult({self.name}: {rate} meets {bounds}; {tried} rates tried)"

    def _repr_html_(self) -> str:
        return html_result(f"Capacity: {self.name}", trial_cells(self.search), [self.verdict])
