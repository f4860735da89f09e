"""An objective: a metric of a run, to minimise or to maximise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.costs.device_profile import load_profile
from servesim.files.suggestions import did_you_mean
from servesim.runs.metrics import PERCENTILES, percentile_name
from servesim.runs.utilisation import NEEDS, missing_figures

KINDS = ("mean", "median", "std", *(f"p{q}" for q in PERCENTILES))
MAXIMISED = (
    "completed", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "attainment",
    "mfu", "mbu",
)  # fmt: skip
MINIMISED = (
    "makespan", "duration", "failed", "evictions", "model_calls", "busy_s", "prompt_tokens_computed",
    "padded_prompt_tokens", "padded_decode_rows", "energy",
)  # fmt: skip
LATENCIES = ("ttft", "tpot", "itl", "e2el")
METRICS = (*MINIMISED, *MAXIMISED, *(f"{kind}_{name}_ms" for name in LATENCIES for kind in KINDS))


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


def percentile_metrics(percentiles: Sequence[float]) -> list[str]:
    """Return the names of these percentiles of all latencies."""
    return [f"{percentile_name(q)}_{name}_ms" for name in LATENCIES for q in percentiles]


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
    if metric not in METRICS:
        latencies = f"{'|'.join(KINDS)}_ttft|tpot|itl|e2el_ms"
        known = ", ".join((*MINIMISED, *MAXIMISED))
        raise BadInput(f"{where}: no metric {metric!r}; known: {known}, {latencies}{did_you_mean(metric, METRICS)}")
    goal = goal or ("max" if metric in MAXIMISED else "min")
    if goal not in ("min", "max"):
        raise BadInput(f"{where}: {metric}: goal: expected min or max, got {goal!r}")
    return Objective(metric, goal)


def check_figures(metrics: Sequence[str], profiles: Sequence[Any]) -> None:
    """Raise BadInput if a profile lacks what an objective needs: peak figures or power. None is no profile."""
    needing = [metric for metric in metrics if metric in NEEDS]
    for source in {str(source): source for source in profiles if source is not None}.values() if needing else ():
        profile = load_profile(source)
        for metric in needing:
            missing = missing_figures(metric, profile.about)
            if missing is not None:
                raise BadInput(f"objectives: {metric}: profile {profile.name}: {missing}")


def unit(metric: str) -> str:
    """Return the unit of a metric, empty for counts and fractions."""
    if metric == "energy":
        return "J/1k tok"
    if metric.endswith("_ms"):
        return "ms"
    if metric in ("makespan", "duration", "busy_s"):
        return "s"
    if "token_throughput" in metric or metric == "output_throughput":
        return "tok/s"
    return "req/s" if metric in ("request_throughput", "request_goodput") else ""
