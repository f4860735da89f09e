"""Simulated against measured: the signed error of every metric, its sources, and the order of scenarios; as JSON.

An error is (simulated - measured) / measured. The error from step times disappears when the simulation uses the
measured ones. The rest is the error from decisions. Latencies are in milliseconds, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.config.scenario import Scenario
from servesim.core import BadInput
from servesim.engine.rules import rules_of
from servesim.runs.leading import leading_metrics
from servesim.runs.metric_table import metrics_in, percentile_metrics
from servesim.runs.notes import note
from servesim.runs.run_folder import RESULT, RunData

METRICS = metrics_in("verify")
CHECKED_METRICS = metrics_in("checked")
RANKED_METRICS = metrics_in("ranked")
DECISION_FIELDS = ("kind", "chunks", "preempted", "swapped_in", "rejected")  # of a step in the decision log


@dataclass(frozen=True)
class MetricRow:
    """One metric, simulated and measured."""

    metric: str
    simulated: Optional[float]
    measured: Optional[float]
    resimulated: Optional[float] = None  # with the measured step times
    interval: Optional[tuple[float, float]] = None  # of the simulated value
    outside_server: Optional[tuple[float, float]] = None  # the part before and after the server: simulated, measured

    @property
    def is_time(self) -> bool:
        """Whether the metric is a time, or a throughput."""
        return self.metric.endswith(("_ms", "makespan", "throughput"))

    @property
    def inside(self) -> Optional[bool]:
        """Whether the measured value is in the interval; None without one."""
        if self.interval is None or self.measured is None:
            return None
        return self.interval[0] <= self.measured <= self.interval[1]

    @property
    def error(self) -> Optional[float]:
        """The signed relative error; None if the measured value is missing or zero."""
        return relative_error(self.simulated, self.measured)

    @property
    def from_decisions(self) -> Optional[float]:
        """The error that remains with measured step times."""
        return relative_error(self.resimulated, self.measured)

    @property
    def from_step_times(self) -> Optional[float]:
        """The error that disappears with measured step times."""
        if self.error is None or self.from_decisions is None:
            return None
        return self.error - self.from_decisions

    @property
    def from_http(self) -> Optional[float]:
        """The error from the time outside the server: network, HTTP and the client."""
        if self.outside_server is None or not self.measured:
            return None
        simulated, measured = self.outside_server
        return (simulated - measured) / self.measured

    @property
    def sources(self) -> tuple[Optional[float], Optional[float]]:
        """The two parts of the error: HTTP and the rest against a server, else step times and decisions."""
        if self.from_http is None or self.error is None:
            return self.from_step_times, self.from_decisions
        return self.from_http, self.error - self.from_http

    def exceeds(self, tolerance: float) -> bool:
        """Whether the error is larger than the tolerance, or one side has no value."""
        if self.error is None:
            return self.simulated != self.measured
        return abs(self.error) > tolerance

    def as_dict(self) -> dict[str, Any]:
        """Return both values, the error and its sources, and the interval if there is one."""
        http = {} if self.from_http is None else {"from_http": self.from_http}
        limits = {} if self.interval is None else {"interval": list(self.interval), "inside": self.inside}
        return {
            "simulated": self.simulated,
            "measured": self.measured,
            "error": self.error,
            "from_step_times": self.from_step_times,
            "from_decisions": self.from_decisions,
            **http,
            **limits,
        }


@dataclass(frozen=True)
class Decisions:
    """Number of equal steps in two decision logs. The fields are keys of verify.json."""

    simulated: int  # steps
    measured: int  # steps
    same: int  # equal steps before the first difference
    alike: int  # equal steps at the same index, also after it
    first: Optional[Mapping[str, Any]] = None  # the first step that differs, as measured

    @classmethod
    def of(cls, equal: Sequence[bool], simulated: int, measured: Sequence[Mapping[str, Any]]) -> Decisions:
        """Return the counts; `equal`: of the steps at the same index."""
        same = equal.index(False) if False in equal else len(equal)
        return cls(simulated, len(measured), same, sum(equal), measured[same] if same < len(measured) else None)

    @property
    def identical(self) -> bool:
        """Whether all steps are equal."""
        return self.simulated == self.measured == self.same


@dataclass(frozen=True)
class LatencyDifference:
    """One latency, simulated minus measured per request, in seconds. The fields are keys of verify.json."""

    name: str
    count: int
    mean: float
    median: float
    spread: float  # standard deviation
    within: float  # fraction of requests with an error of at most 5 % of the measured value
    worst: tuple[tuple[str, float, float], ...]  # id, simulated, measured


@dataclass
class Comparison:
    """One scenario, simulated and measured."""

    name: str
    simulated: RunData = field(repr=False)
    measured: RunData = field(repr=False)
    rows: Sequence[MetricRow]
    decisions: Optional[Decisions]
    latencies: Sequence[LatencyDifference]
    calls_matched: Optional[tuple[int, int]] = None  # with measured step times: equal leading calls, all calls
    notes: Sequence[str] = ()  # settings in which both runs differ

    @property
    def outcomes(self) -> dict[str, Mapping[str, int]]:
        """The numbers of requests with each outcome."""
        sides = {"simulated": self.simulated, "measured": self.measured}
        return {name: side.result.get("outcomes", {}) for name, side in sides.items()}

    @property
    def token_check(self) -> Optional[Mapping[str, Any]]:
        """The token check of the measured run without its answers; None without one."""
        check = self.measured.result.get("token_check")
        if not (isinstance(check, Mapping) and {"checked", "equal"} <= set(check)):
            return None
        return {key: value for key, value in check.items() if key != "answers"}

    def row(self, metric: str) -> MetricRow:
        """Return the row of a metric."""
        check_metrics([metric], [row.metric for row in self.rows])
        return next(row for row in self.rows if row.metric == metric)

    def outside(self, tolerance: float, metrics: Sequence[str] = CHECKED_METRICS) -> list[MetricRow]:
        """Return the checked metrics whose error exceeds the tolerance."""
        return [row for row in map(self.row, metrics) if row.exceeds(tolerance)]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        decisions = self.decisions
        return {
            "name": self.name,
            "metrics": {row.metric: row.as_dict() for row in self.rows},
            "decisions": decisions and {**vars(decisions), "identical": decisions.identical},
            "latencies": [vars(latency) for latency in self.latencies],
            "calls_matched": self.calls_matched,
            "outcomes": self.outcomes,
            "notes": list(self.notes),
            **({} if self.token_check is None else {"token_check": self.token_check}),
        }


def check_metrics(metrics: Sequence[str], known: Sequence[str] = METRICS) -> None:
    """Raise BadInput for a metric that is not compared."""
    for metric in metrics:
        if metric not in known:
            raise BadInput(f"metric {metric!r}: not compared; known: {', '.join(known)}")


def relative_error(simulated: Optional[float], measured: Optional[float]) -> Optional[float]:
    """Return the signed relative error, or None."""
    if simulated is None or measured is None:
        return None
    if measured == 0:
        return 0.0 if simulated == 0 else None
    return (simulated - measured) / measured


def compare(
    simulated: RunData, measured: RunData, resimulated: Optional[RunData] = None, calls_matched: Optional[int] = None,
    percentiles: Sequence[float] = (),
) -> Comparison:  # fmt: skip
    """Compare two runs; `resimulated` is the simulation with measured step times."""
    resimulated = RunData({}, {}) if resimulated is None else resimulated
    latencies = (compare_latency(name, simulated, measured) for name in ("ttft", "e2el"))
    intervals = (simulated.result.get("intervals") or {}).get("metrics", {})
    limits = {metric: (low, high) for metric, (low, high) in intervals.items()}
    outside = time_outside_server(simulated, measured)
    rows = [
        MetricRow(m, simulated.metric(m), measured.metric(m), resimulated.metric(m), limits.get(m), outside.get(m))
        for m in dict.fromkeys([*leading_of(measured), *METRICS, *percentile_metrics(percentiles)])
    ]
    return Comparison(
        measured.name or simulated.name,
        simulated,
        measured,
        rows,
        compare_decisions(simulated, measured),
        [difference for difference in latencies if difference is not None],
        None if calls_matched is None else (calls_matched, len(measured.calls)),
        differing_settings(simulated, measured),
    )


def leading_of(run: RunData) -> list[str]:
    """Return the compared metrics that lead for the requests of a run."""
    scenario = {} if run.scenario is None else run.scenario.model_dump(mode="json")
    arrivals = [float(request["arrival"]) for request in run.requests.values()]
    return [metric for metric in leading_metrics(scenario, arrivals=arrivals) if metric in METRICS]


def differing_settings(simulated: RunData, measured: RunData) -> list[str]:
    """Return the settings of the server of a measured run that the simulation has not; none if they are not known."""
    scenario = simulated.scenario
    if scenario is None or not scenario.policy_is_loadable:
        return []
    return setting_notes(scenario, measured.result.get("server_settings") or {})


def setting_notes(scenario: Scenario, server: Mapping[str, Any]) -> list[str]:
    """Return one line per setting in which a server differs; `server` is that of `read_settings`."""
    policy, engine = scenario.make_policy(), scenario.engine
    ours = {
        "block_size": ("engine.block_size", engine.block_size),
        "num_blocks": ("engine.num_blocks", engine.num_blocks),
        "prefix_cache": ("prefix cache", rules_of(policy).has_prefix_cache),
    }
    notes = [
        note("other setting", setting=setting, server=shown(server[name]), simulated=shown(simulated)).text
        for name, (setting, simulated) in ours.items()
        if name in server and server[name] != simulated
    ]
    version, rules = server.get("version"), scenario.policy.get("version") or getattr(policy, "version", None)
    if version is not None and scenario.policy["name"] == "vllm-v1" and version != rules:
        notes.append(note("other version", version=version, simulated=rules).text)
    return notes


def shown(value: Any) -> str:
    """Return a setting as text."""
    return ("on" if value else "off") if isinstance(value, bool) else f"{value:,}"


def time_outside_server(simulated: RunData, measured: RunData) -> dict[str, tuple[float, float]]:
    """Return the milliseconds of a latency before and after the server, simulated and measured, by metric.

    Simulated, it is the front end. Measured, it is known if the server has the latency among its own metrics.
    """
    in_server: Mapping[str, float] = measured.result.get("server_latencies") or {}
    front_end = 1e3 * (simulated.result.get("mean_seconds") or {}).get("front_end", 0.0)
    known = {metric: (measured.metric(metric), value) for metric, value in in_server.items()}
    return {metric: (front_end, client - value) for metric, (client, value) in known.items() if client is not None}


def compare_decisions(simulated: RunData, measured: RunData) -> Optional[Decisions]:
    """Compare two decision logs step by step."""
    if simulated.decisions is None or measured.decisions is None:
        return None
    ours, theirs = simulated.decisions, measured.decisions
    equal = [all(a[key] == b[key] for key in DECISION_FIELDS) for a, b in zip(ours, theirs)]
    return Decisions.of(equal, len(ours), theirs)


def compare_latency(name: str, simulated: RunData, measured: RunData) -> Optional[LatencyDifference]:
    """Compare a latency of the requests that finished in both runs."""
    pairs = latency_pairs(name, simulated, measured)
    if not pairs:
        return None
    ids, (ours, theirs) = list(pairs), np.array(list(pairs.values())).T
    error = ours - theirs
    mean, median, std = float(error.mean()), float(np.median(error)), float(error.std())
    worst = [(ids[i], float(ours[i]), float(theirs[i])) for i in np.argsort(-np.abs(error), kind="stable")[:5]]
    within = float(np.mean(np.abs(error) <= 0.05 * theirs))
    return LatencyDifference(name, len(ids), mean, median, std, within, tuple(worst))


def latency_pairs(name: str, simulated: RunData, measured: RunData) -> dict[str, tuple[float, float]]:
    """Return a latency in seconds, simulated and measured, per request that finished in both runs."""
    end, pairs = "first_token" if name == "ttft" else "finish", {}
    for id, theirs in measured.requests.items():
        ours = simulated.requests.get(id)
        if ours is not None and ours["outcome"] == theirs["outcome"] == "finished":
            pairs[id] = (float(ours[end]) - float(ours["arrival"]), float(theirs[end]) - float(theirs["arrival"]))
    return pairs


def kendall_tau(ours: Sequence[float], theirs: Sequence[float]) -> Optional[float]:
    """Return Kendall's tau-b of two rankings; None if all values of one are equal."""
    from scipy.stats import kendalltau

    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return None
    return float(kendalltau(ours, theirs).statistic)


def rank_correlations(
    comparisons: Sequence[Comparison], metrics: Sequence[str] = RANKED_METRICS
) -> dict[str, Optional[float]]:
    """Return Kendall's tau of the simulated and the measured order of scenarios, per metric."""
    taus: dict[str, Optional[float]] = {}
    for metric in metrics:
        rows = [comparison.row(metric) for comparison in comparisons]
        pairs = [(a.simulated, a.measured) for a in rows if a.simulated is not None and a.measured is not None]
        taus[metric] = kendall_tau([a for a, _ in pairs], [b for _, b in pairs])
    return taus


def comparisons_to_json(comparisons: Sequence[Comparison], tolerance: Optional[float]) -> dict[str, Any]:
    """Return the content of verify.json."""
    return {
        "tolerance": tolerance,
        "comparisons": [comparison.as_dict() for comparison in comparisons],
        **({"kendall_tau": rank_correlations(comparisons)} if len(comparisons) > 1 else {}),
    }


def pair_folders(simulated: Path, measured: Path) -> tuple[list[tuple[str, Path, Path]], list[str]]:
    """Return the runs that are in both folders (name, simulated, measured), and the names that are in one only."""
    for folder in (simulated, measured):
        if not folder.is_dir():
            raise BadInput(f"{folder}: no such folder")
    if (simulated / RESULT).exists() or (measured / RESULT).exists():
        return [("", simulated, measured)], []
    ours = {path.parent.name for path in simulated.glob(f"*/{RESULT}")}
    theirs = {path.parent.name for path in measured.glob(f"*/{RESULT}")}
    if not ours & theirs:
        raise BadInput(f"{simulated} and {measured}: expected runs in both folders with the same names, got none")
    both = [(name, simulated / name, measured / name) for name in sorted(ours & theirs)]
    return both, sorted(ours ^ theirs)
