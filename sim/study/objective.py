"""An objective: a figure of a run, and whether it is to be small or large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.files.suggestions import meant
from servesim.runs.metrics import PERCENTILES

KINDS = ("mean", "median", "std", *(f"p{q}" for q in PERCENTILES))
LARGE = (
    "completed", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "attainment",
)  # fmt: skip
SMALL = (
    "makespan", "duration", "failed", "evictions", "model_calls", "busy_s", "prompt_tokens_computed",
    "padded_prompt_tokens", "padded_decode_rows",
)  # fmt: skip
FIGURES = (*SMALL, *LARGE, *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in KINDS))


class Objective(NamedTuple):
    """What is to be made small, or large."""

    metric: str
    goal: str  # min | max

    @property
    def sign(self) -> int:
        """1 where small is good, -1 where large is."""
        return 1 if self.goal == "min" else -1

    def better(self, change: float) -> bool:
        """Whether a change of the figure is for the better."""
        return change * self.sign < 0


def objective(given: Any, where: str = "objectives") -> Objective:
    """Read `makespan`, `max:output_throughput` or {metric: ..., goal: min|max}."""
    goal = None
    if isinstance(given, Mapping):
        if set(given) - {"metric", "goal"} or "metric" not in given:
            raise BadInput(f"{where}: expected metric and goal, got {', '.join(map(str, given))}")
        metric, goal = str(given["metric"]), given.get("goal")
    else:
        head, colon, metric = str(given).rpartition(":")
        goal = head if colon else None
    if metric not in FIGURES:
        spans = f"{'|'.join(KINDS)}_ttft|tpot|itl|e2el_ms"
        hint = meant(metric, FIGURES)
        raise BadInput(f"{where}: no figure {metric!r}; known: {', '.join((*SMALL, *LARGE))}, {spans}{hint}")
    goal = goal or ("max" if metric in LARGE else "min")
    if goal not in ("min", "max"):
        raise BadInput(f"{where}: {metric}: goal: expected min or max, got {goal!r}")
    return Objective(metric, goal)


def unit(metric: str) -> str:
    """Return the unit a figure is in, for people."""
    if metric.endswith("_ms"):
        return "ms"
    if metric in ("makespan", "duration", "busy_s"):
        return "s"
    if "token_throughput" in metric or metric == "output_throughput":
        return "tok/s"
    return "req/s" if metric in ("request_throughput", "request_goodput") else ""
