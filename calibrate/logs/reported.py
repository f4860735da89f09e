"""Figures that a report gives of a run: means and quantiles of latencies, of all requests or of one stage."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Optional

import numpy as np
from pydantic import BeforeValidator
from servesim.core import BadInput
from servesim.files.checked import Positive, expects, invalid_error
from servesim.runs.metrics import PERCENTILES, Metrics

FIGURE = re.compile(r"(mean|median|p\d{1,2}(?:\.\d{1,3})?)_(ttft|tpot|itl|e2el)_ms")
SPREADS = {"ttft": 0.03, "tpot": 0.01, "itl": 0.01, "e2el": 0.01}  # relative difference of two runs of one setting
TAIL_SPREAD = 3.0  # times the spread: of quantiles other than the median


def figure_names(value: Any) -> Any:
    """Check the names of figures; `e2e` is another name of `e2el`."""
    if not isinstance(value, Mapping):
        return value
    figures = {re.sub(r"_e2e_ms$", "_e2el_ms", str(name)): number for name, number in value.items()}
    for name in figures:
        if not FIGURE.fullmatch(name):
            raise invalid_error(
                f"unknown figure {name[:40]!r}: expected mean, median or p1 to p99 of ttft, tpot, itl or e2el, for "
                "example mean_ttft_ms or p90_e2el_ms"
            )
        if name.endswith("_itl_ms") and name.split("_")[0] not in ("mean", "median", *(f"p{q}" for q in PERCENTILES)):
            raise invalid_error(f"{name}: expected mean, median or one of {', '.join(f'p{q}' for q in PERCENTILES)}")
    return figures


Figures = Annotated[
    dict[str, Positive], expects("figures in milliseconds, like {mean_ttft_ms: 94.5}"), BeforeValidator(figure_names)
]
FiguresByStage = Annotated[list[Figures], BeforeValidator(lambda value: value if isinstance(value, list) else [value])]


@dataclass(frozen=True)
class Reported:
    """Figures of the requests that were sent in a period of time."""

    figures: Mapping[str, float]  # milliseconds
    window: Optional[tuple[float, float]] = None  # seconds since the first request; None: all requests
    name: str = ""  # of the stage

    def compare(self, metrics: Metrics) -> dict[str, tuple[float, float]]:
        """Return every figure, measured and predicted, in milliseconds."""
        return {name: (value, self._predicted(name, metrics)) for name, value in self.figures.items()}

    def _predicted(self, name: str, metrics: Metrics) -> float:
        statistic, latency, _ = name.split("_")
        if latency == "itl":
            return 1e3 * metrics.itl.get(statistic, math.nan)
        values = {"ttft": metrics.ttft, "tpot": metrics.tpot_of, "e2el": metrics.e2el}[latency]
        chosen = np.ones(len(values), bool)
        if self.window is not None:
            sent = np.array([request.sent for request in metrics.done])
            sent = sent - min(request.sent for request in metrics.requests)
            chosen = (sent >= self.window[0]) & (sent < self.window[1])
        if latency == "tpot":
            chosen &= np.array([request.written > 1 for request in metrics.done], bool)
        values = values[chosen]
        if not len(values):
            return math.nan
        if statistic == "mean":
            return 1e3 * float(values.mean())
        return 1e3 * float(np.percentile(values, 50.0 if statistic == "median" else float(statistic[1:])))


def relative_spread(name: str) -> float:
    """Return the relative standard deviation of a figure."""
    statistic, latency, _ = name.split("_")
    return SPREADS[latency] * (1.0 if statistic in ("mean", "median") else TAIL_SPREAD)


def reported_parts(value: Sequence[Mapping[str, float]], workload: Any, where: str) -> list[Reported]:
    """Return the figures of a run: one mapping for all requests, or one per stage of the workload."""
    if len(value) < 2:
        return [Reported(figures) for figures in value]
    stages: Sequence[Any] = (workload or {}).get("stages") or ()
    if len(stages) != len(value):
        raise BadInput(
            f"{where}.reported: expected one entry per stage of the workload ({len(stages)}), got {len(value)}"
        )
    if any(name.endswith("_itl_ms") for figures in value for name in figures):
        raise BadInput(f"{where}.reported: expected itl for the whole run only, got it for a stage")
    ends = np.cumsum([float(stage["seconds"]) for stage in stages]).tolist()
    windows = zip([0.0, *ends[:-1]], [*ends[:-1], math.inf])
    return [Reported(figures, window, f"stage {k}") for k, (figures, window) in enumerate(zip(value, windows))]
