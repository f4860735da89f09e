"""The result of one run, simulated or measured, as pandas frames.

Times are seconds, except metrics whose names end in _ms. The frame of requests is indexed by request id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional

import pandas as pd
from servesim.config.export import export_text
from servesim.config.layers import Tree
from servesim.config.scenario import Scenario
from servesim.core import BadInput
from servesim.report.trust import policy_note
from servesim.runs.decision_log import InMemoryLog
from servesim.runs.intervals import intervals_of
from servesim.runs.leading import leading_metrics
from servesim.runs.metric_table import metrics_in
from servesim.runs.metrics import time_per_token
from servesim.runs.replicas import DRAFTS, REPLICA
from servesim.runs.request_rows import RECORDED, STATES
from servesim.runs.run_folder import RunData, run_data
from servesim.runs.run_warnings import run_notes
from servesim.runs.simulate import Run, load_trace, simulate
from servesim.statistics.number_format import format_metric
from servesim.study.columns import html_result

if TYPE_CHECKING:
    from servesim.traces.trace import Trace

LOG_COLUMNS = ("t", "t_end", "kind", "free")  # of a decision log, unchanged
LIST_COLUMNS = (  # of a decision log, counted
    "prompts", "admitted", "preempted", "swapped_in", "waiting", "running", "swapped", "finished",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One run, simulated or measured."""

    scenario: Tree  # all inputs of the run
    metrics: Mapping[str, Any]  # content of result.json: vLLM's keys, then simulator-only metrics
    requests: pd.DataFrame  # one row per request: requests.csv
    decisions: Optional[pd.DataFrame] = None  # one row per scheduler step, if a decision log was kept

    @property
    def summary(self) -> pd.Series[Any]:
        """The metrics that are numbers, to compare runs in one table."""
        return pd.Series({key: value for key, value in self.metrics.items() if type(value) in (int, float)})

    @property
    def replicas(self) -> pd.DataFrame:
        """One row per replica of a cluster, by name; empty for a single server."""
        rows = self.metrics.get("replicas", [])
        return pd.DataFrame(rows).set_index("name") if rows else pd.DataFrame()

    @property
    def time_breakdown(self) -> pd.Series[Any]:
        """Mean seconds of a finished request in each state."""
        return pd.Series(self.metrics["mean_seconds"]).reindex(list(STATES))

    def diff(self, other: Result) -> pd.DataFrame:
        """Return the latencies of this run minus those of another, for requests that finished in both."""
        both = self.requests.join(other.requests.add_suffix("_other"), how="inner")
        both = both[(both.outcome == "finished") & (both.outcome_other == "finished")]
        changed = {name: both[name] - both[f"{name}_other"] for name in ("ttft", "tpot", "e2el")}
        return both[["arrival", "prompt", "output"]].assign(**changed)

    def export(self, to: str, model: Optional[str] = None) -> str:
        """Return the command or the configuration of a real server: vllm, sglang, mindie or llm-serving."""
        if not self.scenario:
            raise BadInput("export: the folder of this run has no scenario")
        return export_text(self.scenario, to, model, "a run")

    @property
    def _policy(self) -> str:
        """The name of the policy; a measured run may have no scenario."""
        return str(self.scenario.get("policy", {}).get("name", "measured"))

    @property
    def verdict(self) -> str:
        """The result in one sentence; `stuck` if the engine could not continue."""
        done, seconds = self.metrics["completed"], format_metric(self.metrics["makespan"], "makespan")
        stuck = self.metrics.get("stuck")
        values = "; ".join(f"{name} {format_metric(self.metrics[name], name)}" for name in self.leading)
        text = f"{done:,} of {len(self.requests):,} requests finished in {seconds}{values and f': {values}'}."
        return text + (f" {stuck}" if stuck else "")

    @property
    def leading(self) -> list[str]:
        """The metrics that lead for the load of the run, without the makespan."""
        names = leading_metrics(self.scenario, arrivals=self.requests.arrival)
        return [name for name in names if name != "makespan" and self.metrics.get(name) is not None]

    def __repr__(self) -> str:
        done = self.metrics["completed"]
        return f"Result({self._policy}: {done} of {len(self.requests)} requests in {self.metrics['makespan']:.2f} s)"

    def _repr_html_(self) -> str:
        names = dict.fromkeys([*self.leading, *metrics_in("summary")])
        shown = [name for name in names if self.metrics.get(name) is not None]
        cells = [["metric", "value"], *([name, format_metric(self.metrics[name], name)] for name in shown)]
        notes = [self.verdict, *(f"Warning: {text}" for text in self.metrics.get("warnings", ()))]
        notes.append(policy_note([self.scenario]))
        return html_result(f"Run: {self._policy}", cells, notes)


def run_scenario(
    scenario: Scenario,
    requests: Optional[Trace],
    decisions: bool,
    draws: Sequence[Mapping[str, Any]] = (),
    repeated: Optional[Scenario] = None,
) -> Result:
    """Simulate a checked scenario; `decisions` keeps one row per scheduler step.

    `draws`, of the scenario `repeated`, give the intervals.
    """
    log = InMemoryLog() if decisions else None
    trace = load_trace(scenario) if requests is None else requests
    run = simulate(scenario, trace, [] if log is None else [log])
    run.notes = run_notes(scenario, run.profile, trace)
    if draws:
        run.intervals = intervals_of(replace(run, scenario=repeated or scenario), draws, run.profile)
    return result_of(run, None if log is None else log.rows)


def result_of(run: Run, log: Optional[Sequence[Mapping[str, Any]]] = None) -> Result:
    """Return a run as frames."""
    return result_of_data(run_data(run, log))


def result_of_data(data: RunData) -> Result:
    """Return a run read from its folder as frames."""
    scenario = {} if data.scenario is None else data.scenario.model_dump(mode="json")
    decisions = None if data.decisions is None else decisions_of(data.decisions)
    return Result(scenario, data.result, replay_requests(data.requests.values()), decisions)


def replay_requests(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the frame of requests; only finished requests have latencies."""
    cells = list(rows)
    names = [*RECORDED, *(name for name in (*DRAFTS, REPLICA) if cells and name in cells[0])]
    frame = pd.DataFrame(cells, columns=names).set_index("id")
    times = frame[["first_token", "finish"]].astype(float).where(frame.outcome == "finished")
    frame["ttft"] = times.first_token - frame.arrival
    frame["e2el"] = times.finish - frame.arrival
    frame["tpot"] = time_per_token(frame.ttft, frame.e2el, frame.output).where(frame.output > 1)
    return frame


def decisions_of(log: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a decision log as a frame: queue lengths, batch size and tokens of each step."""
    log_columns = [*LOG_COLUMNS, *([REPLICA] if log and REPLICA in log[0] else [])]
    rows = [
        {
            **{name: step[name] for name in log_columns},
            **{name: len(step[name]) for name in LIST_COLUMNS},
            "batch": len(step["chunks"]),
            "tokens": sum(tokens for _, tokens in step["chunks"]),
        }
        for step in log
    ]
    return pd.DataFrame(rows, columns=[*log_columns, *LIST_COLUMNS, "batch", "tokens"])
