"""Simulated against measured: the error of every figure with its sign, where it comes from, and whether ranks hold.

An error is (simulated - measured) / measured. Its part from step times is what goes away when the simulation is run
with the measured ones; what is left comes from other decisions. Times in milliseconds where vLLM has them so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.core import BadInput
from servesim.runs.run_folder import RESULT, RunData

LATENCIES = ("ttft", "tpot", "itl", "e2el")
METRICS = (
    "makespan", "request_throughput", "output_throughput",
    *(f"{kind}_{name}_ms" for name in LATENCIES for kind in ("mean", "median", "p90", "p99")),
    "evictions", "model_calls",
)  # fmt: skip
JUDGED = ("makespan", "output_throughput", "mean_ttft_ms", "mean_tpot_ms", "p99_e2el_ms")  # unless others are named
RANKED = ("makespan", "mean_ttft_ms", "mean_tpot_ms", "p99_e2el_ms")
DECIDED = ("kind", "chunks", "evicted", "swapped_in", "rejected")  # of a turn: what was decided


@dataclass(frozen=True)
class Line:
    """One figure on both sides."""

    metric: str
    simulated: Optional[float]
    measured: Optional[float]
    again: Optional[float] = None  # simulated with the measured step times

    @property
    def error(self) -> Optional[float]:
        """The relative error, signed; None where there is nothing to divide by."""
        return relative(self.simulated, self.measured)

    @property
    def decisions(self) -> Optional[float]:
        """The part of the error that measured step times leave."""
        return relative(self.again, self.measured)

    @property
    def steps(self) -> Optional[float]:
        """The part that they take away."""
        if self.error is None or self.decisions is None:
            return None
        return self.error - self.decisions

    def outside(self, tolerance: float) -> bool:
        """Whether the error is larger; a figure that one side lacks is outside too."""
        if self.error is None:
            return self.simulated != self.measured
        return abs(self.error) > tolerance

    def as_dict(self) -> dict[str, Optional[float]]:
        """Return both values, the error and its two parts."""
        return {
            "simulated": self.simulated,
            "measured": self.measured,
            "error": self.error,
            "from_step_times": self.steps,
            "from_decisions": self.decisions,
        }


@dataclass(frozen=True)
class Decisions:
    """How far the two sides decided alike."""

    simulated: int  # turns
    measured: int
    same: int  # equal from the start, one by one
    alike: int  # equal at the same place
    first: Optional[Mapping[str, Any]] = None  # the first turn that differs, as measured

    @property
    def identical(self) -> bool:
        """Whether every turn is the same."""
        return self.simulated == self.measured == self.same


@dataclass(frozen=True)
class Paired:
    """One latency, request by request: simulated minus measured, in seconds."""

    name: str
    count: int
    mean: float
    median: float
    spread: float  # standard deviation
    within: float  # share of requests whose error is at most 5 % of the measured value
    worst: tuple[tuple[str, float, float], ...]  # id, simulated, measured


@dataclass
class Comparison:
    """One setting, simulated and measured."""

    name: str
    lines: Sequence[Line]
    decisions: Optional[Decisions]
    paired: Sequence[Paired]
    followed: Optional[tuple[int, int]] = None  # calls that went as measured when simulated with measured times, of all
    outcomes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def line(self, metric: str) -> Line:
        """Return one figure's line."""
        for line in self.lines:
            if line.metric == metric:
                return line
        raise BadInput(f"metric {metric!r}: not compared; known: {', '.join(line.metric for line in self.lines)}")

    def outside(self, tolerance: float, metrics: Sequence[str] = JUDGED) -> list[Line]:
        """Return the judged figures whose error is larger."""
        return [line for line in map(self.line, metrics) if line.outside(tolerance)]


def relative(simulated: Optional[float], measured: Optional[float]) -> Optional[float]:
    """Return the signed relative error, or None."""
    if simulated is None or measured is None:
        return None
    if measured == 0:
        return 0.0 if simulated == 0 else None
    return (simulated - measured) / measured


def compare(
    simulated: RunData, measured: RunData, again: Optional[RunData] = None, followed: Optional[int] = None
) -> Comparison:
    """Compare the two sides; `again` is the simulation with measured step times."""
    lines = [
        Line(m, figure(simulated, m), figure(measured, m), None if again is None else figure(again, m)) for m in METRICS
    ]
    return Comparison(
        measured.name or simulated.name,
        lines,
        decisions(simulated, measured),
        [found for name in ("ttft", "e2el") if (found := paired(name, simulated, measured)) is not None],
        None if followed is None else (followed, len(measured.calls)),
        {"simulated": simulated.result.get("outcomes", {}), "measured": measured.result.get("outcomes", {})},
    )


def figure(side: RunData, metric: str) -> Optional[float]:
    """Return a figure of a side, or None."""
    value = side.result.get(metric)
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else float(value)


def decisions(simulated: RunData, measured: RunData) -> Optional[Decisions]:
    """Compare the decision logs turn by turn."""
    if simulated.decisions is None or measured.decisions is None:
        return None
    ours, theirs = simulated.decisions, measured.decisions
    equal = [all(a[key] == b[key] for key in DECIDED) for a, b in zip(ours, theirs)]
    same = next((place for place, alike in enumerate(equal) if not alike), len(equal))
    first = theirs[same] if same < len(theirs) else None
    return Decisions(len(ours), len(theirs), same, sum(equal), first)


def paired(name: str, simulated: RunData, measured: RunData) -> Optional[Paired]:
    """Compare a latency of the requests that both sides finished."""
    found = latencies(name, simulated, measured)
    if not found:
        return None
    ids, (ours, theirs) = list(found), np.array(list(found.values())).T
    off = ours - theirs
    worst = [(ids[i], float(ours[i]), float(theirs[i])) for i in np.argsort(-np.abs(off), kind="stable")[:5]]
    within = float(np.mean(np.abs(off) <= 0.05 * theirs))
    return Paired(name, len(ids), float(off.mean()), float(np.median(off)), float(off.std()), within, tuple(worst))


def latencies(name: str, simulated: RunData, measured: RunData) -> dict[str, tuple[float, float]]:
    """Return a latency in seconds, simulated and measured, of the requests that both sides finished."""
    end, found = "first_token" if name == "ttft" else "finish", {}
    for id, theirs in measured.requests.items():
        ours = simulated.requests.get(id)
        if ours is not None and ours["outcome"] == theirs["outcome"] == "finished":
            took = [float(row[end]) - float(row["arrival"]) for row in (ours, theirs)]
            found[id] = (took[0], took[1])
    return found


def kendall(ours: Sequence[float], theirs: Sequence[float]) -> Optional[float]:
    """Return Kendall's tau-b of two rankings, None where one of them ranks nothing."""
    from scipy.stats import kendalltau

    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return None
    return float(kendalltau(ours, theirs).statistic)


def ranks(comparisons: Sequence[Comparison], metrics: Sequence[str] = RANKED) -> dict[str, Optional[float]]:
    """Return how well the order of settings holds, by metric."""
    found: dict[str, Optional[float]] = {}
    for metric in metrics:
        lines = [c.line(metric) for c in comparisons]
        pairs = [(a.simulated, a.measured) for a in lines if a.simulated is not None and a.measured is not None]
        found[metric] = kendall([a for a, _ in pairs], [b for _, b in pairs])
    return found


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain JSON."""
    alike = comparison.decisions
    return {
        "name": comparison.name,
        "metrics": {line.metric: line.as_dict() for line in comparison.lines},
        "decisions": alike and {**vars(alike), "identical": alike.identical},
        "paired": [vars(pair) for pair in comparison.paired],
        "followed": comparison.followed,
        "outcomes": comparison.outcomes,
    }


def pair_folders(simulated: Path, measured: Path) -> tuple[list[tuple[str, Path, Path]], list[str]]:
    """Return the runs that both folders have, as (name, simulated, measured), and the names that only one has."""
    for folder in (simulated, measured):
        if not folder.is_dir():
            raise BadInput(f"{folder}: no such folder")
    if (simulated / RESULT).exists() or (measured / RESULT).exists():
        return [("", simulated, measured)], []
    ours = {path.parent.name for path in simulated.glob(f"*/{RESULT}")}
    theirs = {path.parent.name for path in measured.glob(f"*/{RESULT}")}
    if not ours & theirs:
        raise BadInput(f"{simulated} and {measured}: expected runs in both, under the same names; there are none")
    both = [(name, simulated / name, measured / name) for name in sorted(ours & theirs)]
    return both, sorted(ours ^ theirs)
