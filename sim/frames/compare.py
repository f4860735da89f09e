"""The result of a comparison as pandas frames."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Union

import pandas as pd
from servesim.core import BadInput
from servesim.report.compare_page import change_chart, write_compare_report
from servesim.report.figures import draw, styled_axes
from servesim.report.trust import policy_note
from servesim.statistics.objective import parse_objective
from servesim.study.columns import frame_row, html_result, printed_cells
from servesim.study.compare import COLUMNS, Compared, compare, default_objectives
from servesim.study.compared_runs import ComparedRuns, single_run, two_samples

from .run import Result


class CompareResult(Compared):
    """B compared with A, in pairs with the same random numbers."""

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per metric: A, B, B - A and its half-width, the change relative to A, and the outcome."""
        index = pd.Index([d.objective.metric for d in self.differences], name="metric")
        frame = pd.DataFrame([frame_row(COLUMNS, d) for d in self.differences], index=index)
        numbers = ["a", "b", "difference", "half_width", "relative", "relative_low", "relative_high"]
        return frame.astype(dict.fromkeys(numbers, float))

    def pairs(self, metric: str) -> pd.DataFrame:
        """Return the values of A and B in each pair: a replication, or a batch of requests; empty without pairs."""
        a, b, paired, _ = two_samples(self.a, self.b, parse_objective(metric, "metric").metric)
        return pd.DataFrame({"a": a, "b": b} if paired else {"a": [], "b": []}).rename_axis("pair")

    def plot(self, axes: Any = None) -> Any:
        """Draw the relative change of each metric; return the matplotlib axes."""
        with styled_axes(axes, (6.4, 0.4 * len(self.differences) + 1.2)) as axes:
            draw(axes, change_chart(self.differences))
        return axes

    def report(self, path: Union[str, Path]) -> None:
        """Write report.html: one offline page."""
        write_compare_report(self.a, self.b, self.differences, Path(path))

    def __repr__(self) -> str:
        return f"CompareResult({self.verdict})"

    def _repr_html_(self) -> str:
        notes = [self.verdict, self.basis]
        notes.append(policy_note(runs.scenario for runs in (self.a, self.b)))
        return html_result(f"A: {self.a.name}, B: {self.b.name}", printed_cells(COLUMNS, self.differences), notes)


def compare_runs(
    a: ComparedRuns,
    b: ComparedRuns,
    metrics: Union[str, Sequence[str], None] = None,
    confidence: float = 0.95,
) -> CompareResult:
    """Compare loaded or simulated runs in some metrics (default: those of `sim compare`)."""
    names = [metrics] if isinstance(metrics, str) else metrics
    if names is not None and (not isinstance(names, Sequence) or not names):
        raise BadInput(f"metrics: expected names of metrics, got {names!r}")
    objectives = default_objectives(a, b) if names is None else [parse_objective(name, "metrics") for name in names]
    return CompareResult(a, b, compare(a, b, objectives, confidence), confidence)


def runs_of_result(result: Result) -> ComparedRuns:
    """Return the result of one run as a side of a comparison. Ids are text, as in a folder."""
    rows: Any = result.requests.assign(id=result.requests.index.map(str)).to_dict("records")
    name = result.scenario.get("name") or result.scenario.get("policy", {}).get("name") or "run"
    return single_run(str(name), result.metrics, rows, result.scenario)
