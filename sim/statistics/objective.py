"""An objective: a metric of a run, to minimise or to maximise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.costs.device_profile import load_profile
from servesim.files.read import did_you_mean
from servesim.runs.metric_table import METRICS, STATISTICS, is_metric, metric_named
from servesim.runs.utilisation import missing_figures


class Objective(NamedTuple):
    """A metric and its goal."""

    metric: str
    goal: str  # min | max

    @property
    def sign(self) -> int:
        """1 if the metric is minimised, -1 if it is maximised."""
        return 1 if self.goal == "min" else -1

    def better(self, change: float) -> bool:
        """Whether a change of the metric is an improvement."""
        return change * self.sign < 0


def parse_objective(spec: Any, where: str = "objectives") -> Objective:
    """Read `makespan`, `max:output_throughput` or {metric: ..., goal: min|max}."""
    goal = None
    if isinstance(spec, Mapping):
        if set(spec) - {"metric", "goal"} or "metric" not in spec:
            raise BadInput(f"{where}: expected metric and goal, got {', '.join(map(str, spec))}")
        metric, goal = str(spec["metric"]), spec.get("goal")
    else:
        head, colon, metric = str(spec).rpartition(":")
        goal = head if colon else None
    if not is_metric(metric):
        latencies = f"{'|'.join(STATISTICS)}_ttft|tpot|itl|e2el_ms"
        known = ", ".join(name for name in METRICS if not name.endswith("_ms"))
        raise BadInput(f"{where}: no metric {metric!r}; known: {known}, {latencies}{did_you_mean(metric, METRICS)}")
    goal = goal or metric_named(metric).goal
    if goal not in ("min", "max"):
        raise BadInput(f"{where}: {metric}: goal: expected min or max, got {goal!r}")
    return Objective(metric, goal)


def check_figures(metrics: Sequence[str], profiles: Sequence[Any], where: str = "objectives") -> None:
    """Raise BadInput if a profile lacks what a metric needs: peak figures or power. None is no profile."""
    needing = [metric for metric in metrics if metric_named(metric).needs]
    for source in {str(source): source for source in profiles if source is not None}.values() if needing else ():
        profile = load_profile(source)
        for metric in needing:
            missing = missing_figures(metric, profile.about)
            if missing is not None:
                raise BadInput(f"{where}: {metric}: profile {profile.name}: {missing}")
