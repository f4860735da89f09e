"""The result of a sweep over loads as pandas frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

import pandas as pd
from servesim.config.export import export_text
from servesim.config.overrides import Tree
from servesim.core import BadInput
from servesim.report.write import write_report
from servesim.runs.request_rate import format_rate
from servesim.study.curves import Curve
from servesim.study.files import CSV_METRICS
from servesim.study.load_summary import LoadSummary
from servesim.study.load_table import capacity_cells
from servesim.study.table import format_count

from .html import html_result
from .plots import plot_loads, styled_axes
from .sweep import TOP, SweepResult


@dataclass(frozen=True)
class LoadSweepResult:
    """A sweep over loads: the ranking at each load, the curves and capacities of the configurations."""

    summary: LoadSummary = field(repr=False)

    @property
    def loads(self) -> list[float]:
        """The request rates, in rising order."""
        return self.summary.loads

    def at(self, load: float) -> SweepResult:
        """Return the result at one load."""
        if load not in self.summary.by_load:
            raise BadInput(f"load {load:g}: expected one of {', '.join(f'{rate:g}' for rate in self.loads)}")
        return SweepResult(self.summary.by_load[load])

    @cached_property
    def curves(self) -> pd.DataFrame:
        """One row per configuration and tested load: parameters, metrics, and whether it meets the constraints."""
        bounds = [bound.metric for bound in self.summary.experiment.subject_to]
        metrics = list(dict.fromkeys([*(o.metric for o in self.summary.experiment.objectives), *bounds, *CSV_METRICS]))
        rows: list[dict[str, Any]] = [
            {"config": curve.config, "load": point.load, **curve.assignment, "meets": point.good}
            | {name: point.row.mean(name) for name in metrics}
            for curve in self.summary.curves
            for point in curve.points
        ]
        return pd.DataFrame(rows)

    @cached_property
    def capacity(self) -> pd.DataFrame:
        """One row per configuration, the highest capacity first; it needs constraints (`subject_to`)."""
        if not self.summary.experiment.subject_to:
            raise BadInput("capacity: expected constraints in the sweep (`subject_to`), got none")
        rows = []
        for curve in self.summary.curves:
            assert curve.capacity is not None
            limits = {key: value for key, value in curve.capacity._asdict().items() if key != "rate"}
            facts = {"config": curve.config, "rank": curve.rank, "relation": curve.outcome}
            rows.append({**facts, "capacity": curve.capacity.rate, **limits, **curve.assignment})
        return pd.DataFrame(rows).set_index("config")

    @property
    def constraints(self) -> list[str]:
        """The constraints of the sweep (`subject_to`)."""
        return [str(bound) for bound in self.summary.experiment.subject_to]

    @property
    def winner(self) -> Optional[int]:
        """The configuration with the highest capacity, None without one."""
        return None if self.summary.winner is None else self.summary.winner.config

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        return self.summary.verdict.text

    def scenario(self, config: Optional[int] = None) -> Tree:
        """Return the scenario of a configuration (default: the winner) at the rate of the base, for `servesim.run`."""
        number = self.winner if config is None else config
        if number is None:
            raise BadInput(f"sweep {self.summary.experiment.name}: no configuration wins by capacity; choose a number")
        return self.summary.experiment.tree(number)

    def export(self, to: str, config: Optional[int] = None, model: str = "MODEL") -> str:
        """Return a configuration (default: the winner) as the command or the file of vllm, sglang or llm-serving."""
        return export_text(self.scenario(config), to, model, self.summary.experiment.name)

    def plot(self, metric: Optional[str] = None, axes: Any = None, top: int = 6) -> Any:
        """Draw a metric over the load for the best configurations and the baseline; return the matplotlib axes.

        The default metric is that of the first constraint, or the first objective. Crosses miss a constraint.
        """
        experiment = self.summary.experiment
        default = [*(bound.metric for bound in experiment.subject_to), experiment.objectives[0].metric][0]
        chosen = default if metric is None else metric
        if chosen not in self.curves:
            raise BadInput(f"metric {chosen!r}: expected a metric of the curves: {', '.join(map(str, self.curves))}")
        shown = self.summary.curves[:top]
        shown += [] if self.summary.baseline in shown else [self.summary.baseline]
        frames = {self._name(curve): self.curves[self.curves.config == curve.config] for curve in shown}
        with styled_axes(axes) as axes:
            plot_loads(axes, frames, chosen, [bound for bound in experiment.subject_to if bound.metric == chosen])
        return axes

    def _name(self, curve: Curve) -> str:
        return "baseline" if curve.is_baseline else self.summary.settings(curve)

    def report(self, path: Union[str, Path]) -> None:
        """Write report.html: one offline page."""
        write_report(self.summary, Path(path))

    def __repr__(self) -> str:
        name, loads = self.summary.experiment.name, ", ".join(f"{load:g}" for load in self.loads)
        return f"LoadSweepResult({name}: {len(self.summary.curves)} configurations at {loads} req/s)"

    def _repr_html_(self) -> str:
        sizes = {"configuration": len(self.summary.curves), "load": len(self.loads), "run": self.summary.run_count}
        size = ", ".join(format_count(count, noun) for noun, count in sizes.items())
        title = f"{self.summary.experiment.name}: {size}"
        if self.constraints:
            return html_result(title, capacity_cells(self.summary, TOP)[0], [self.verdict])
        results = [[format_rate(load), self.at(load).verdict] for load in self.loads]
        return html_result(title, [["load", "result"], *results])
