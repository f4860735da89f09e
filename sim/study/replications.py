"""Runs of one scenario with different random numbers, also with random cost models: their metrics, what is wrong.

Draw k of the cost model serves the requests of a replication that also ran with the fitted cost model, so the
difference of both runs shows only the effect of the calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

from servesim.runs.notes import note
from servesim.statistics.intervals import Interval, interval

from .single_run import Record, metric_of


class Replications:
    """The runs of a configuration, or of one side of a comparison."""

    runs: Sequence[Record]  # in order of replication
    draws: Sequence[Record]  # runs with random cost models

    @property
    def measured(self) -> Sequence[Record]:
        """The runs that have metrics: those of a server that started, without an error."""
        return [run for run in self.runs if "metrics" in run]

    def metric(self, name: str, key: str = "replication") -> dict[Optional[int], float]:
        """Return a metric of every run that has it, by replication or by seed."""
        return {run.get(key): value for run in self.measured if (value := metric_of(run, name)) is not None}

    def values(self, metric: str) -> list[float]:
        """Return a metric of every run that has it."""
        return [value for run in self.runs if (value := metric_of(run, metric)) is not None]

    def mean(self, metric: str) -> float:
        return self.interval(metric).mean

    def interval(self, metric: str, confidence: float = 0.95) -> Interval:
        """Return the mean of a metric with the interval of the replications."""
        return interval(self.values(metric), confidence)

    def effects(self, metric: str) -> dict[int, float]:
        """Return the change of a metric in each draw: its value minus that of the same requests with fitted costs."""
        fitted, effects = self.metric(metric) if self.draws else {}, {}
        for draw in self.draws:
            value, base = metric_of(draw, metric), fitted.get(draw["replication"])
            if value is not None and base is not None and not draw.get("stuck"):
                effects[draw["draw"]] = value - base
        return effects

    def time_breakdown(self) -> dict[str, float]:
        """Return the mean seconds of a request in each state."""
        runs = [run["time_breakdown"] for run in self.runs if run.get("time_breakdown")]
        return {name: math.fsum(run[name] for run in runs) / len(runs) for name in runs[0]} if runs else {}

    @property
    def refused(self) -> Sequence[str]:
        """Why the real engine does not start with these settings; empty if it starts."""
        return self.runs[0].get("refused", ()) if self.runs else ()

    @property
    def is_saturated(self) -> bool:
        """Whether the backlog grows in most runs."""
        return 2 * sum(bool(run.get("saturated")) for run in self.runs) > len(self.runs)

    @property
    def is_outside_profile(self) -> bool:
        """Whether the profile does not cover all steps."""
        return any(run.get("outside_profile") for run in self.runs)


def find_invalid(runs: Sequence[Record]) -> dict[str, str]:
    """Return why the metrics of runs are not those of a server, as a name and a text; empty if they are."""
    for run in runs:
        if "error" in run:
            return {"failed": f"a run failed: {run['error']}"}
        if run.get("stuck"):
            return {"stuck": note("stuck run", reason=run["stuck"]).text}
        if run.get("refused"):
            return {"refused": note("refused", engine="real engine", reasons="; ".join(run["refused"])).text}
    return {}
