"""What came of a run, a sweep or a replay, as pandas frames.

Times are seconds, but for figures whose names end in _ms. Frames of requests are indexed by request id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import pandas as pd
from servesim.config.overrides import Tree
from servesim.config.scenario import Scenario
from servesim.core import BadInput, Shape
from servesim.engine.step import ModelCall
from servesim.report.page import write_report
from servesim.runs.decision_log import Notes
from servesim.runs.metrics import COLUMNS, WHERE, row, time_per_token
from servesim.runs.simulate import Run, simulate
from servesim.study.files import FIGURES
from servesim.study.intervals import Interval
from servesim.study.number_format import spread
from servesim.study.objective import objective
from servesim.study.ranking import Row, Summary
from servesim.study.single_run import Bench

if TYPE_CHECKING:
    from servesim.calibrate.replay.replay import Replayed
    from servesim.calibrate.replay.verify import Comparison
    from servesim.costs.device_profile import Profile
    from servesim.runs.run_folder import RunData
    from servesim.traces.trace import Trace

TURNS = ("t", "t_end", "kind", "free")  # of a decision log, kept as they are
ALIKE = 0.0005  # a part of the best by which values of a knob may differ and still be called the same
COUNTED = ("prompts", "admitted", "evicted", "swapped_in", "waiting", "running", "swapped", "finished")


@dataclass(frozen=True)
class Result:
    """One run, simulated or measured."""

    scenario: Tree  # all that it depended on
    figures: Mapping[str, Any]  # what result.json holds: vLLM's keys, then what only a simulator knows
    requests: pd.DataFrame  # a row a request: requests.csv, and ttft, tpot, e2el of those that finished
    turns: Optional[pd.DataFrame] = None  # a row a turn of the scheduler, where a decision log was kept

    @property
    def summary(self) -> pd.Series[Any]:
        """The figures that are numbers, for putting runs side by side."""
        return pd.Series({key: value for key, value in self.figures.items() if type(value) in (int, float)})

    @property
    def where(self) -> pd.Series[Any]:
        """Mean seconds that finished requests spent in each state."""
        return pd.Series(self.figures["mean_seconds"]).reindex(list(WHERE))

    def against(self, other: Result) -> pd.DataFrame:
        """Return what changed for whom: this run's latencies less the other's, of requests that finished in both."""
        both = self.requests.join(other.requests.add_suffix("_other"), how="inner")
        both = both[(both.outcome == "finished") & (both.outcome_other == "finished")]
        changed = {name: both[name] - both[f"{name}_other"] for name in ("ttft", "tpot", "e2el")}
        return both[["arrival", "prompt", "output"]].assign(**changed)

    def __repr__(self) -> str:
        done, name = self.figures["completed"], self.scenario["policy"]["name"]
        return f"Result({name}: {done} of {len(self.requests)} requests in {self.figures['makespan']:.2f} s)"


def run_scenario(scenario: Scenario, requests: Optional[Trace], turns: bool) -> Result:
    """Simulate a checked scenario; `turns` keeps a row for every step of the scheduler."""
    notes = Notes() if turns else None
    done = simulate(scenario, requests, [] if notes is None else [notes])
    return result_of(done, None if notes is None else notes.rows)


def result_of(run: Run, log: Optional[Sequence[Mapping[str, Any]]] = None) -> Result:
    """Return a run as frames."""
    rows = [dict(zip(COLUMNS, row(request))) for request in run.requests]
    turns = None if log is None else turns_of(log)
    return Result(run.scenario.model_dump(mode="json"), run.result(), requests_of(rows), turns)


def result_of_data(data: RunData) -> Result:
    """Return a run that was read from its folder as frames."""
    scenario = {} if data.scenario is None else data.scenario.model_dump(mode="json")
    turns = None if data.decisions is None else turns_of(data.decisions)
    return Result(scenario, data.result, requests_of(data.requests.values()), turns)


def requests_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the frame of requests; latencies are those of answers that came to their end."""
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS)).set_index("id")
    times = frame[["first_token", "finish"]].astype(float).where(frame.outcome == "finished")
    frame["ttft"] = times.first_token - frame.arrival
    frame["e2el"] = times.finish - frame.arrival
    frame["tpot"] = time_per_token(frame.ttft, frame.e2el, frame.output).where(frame.output > 1)
    return frame


def turns_of(log: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a decision log as a frame: how many were where, and the tokens of each turn."""
    rows = [
        {
            **{name: turn[name] for name in TURNS},
            **{name: len(turn[name]) for name in COUNTED},
            "batch": len(turn["chunks"]),
            "tokens": sum(tokens for _, tokens in turn["chunks"]),
        }
        for turn in log
    ]
    return pd.DataFrame(rows, columns=[*TURNS, *COUNTED, "batch", "tokens"])


@dataclass(frozen=True)
class Sweep:
    """An experiment: its configurations, the best first."""

    found: Summary = field(repr=False)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row a configuration, the best first: what it sets, means with half-widths, differences to the baseline."""
        return pd.DataFrame([self._line(row) for row in self.found.rows]).set_index("config")

    def _line(self, row: Row) -> dict[str, Any]:
        facts = {"config": row.config, "rank": row.rank, "labels": ", ".join(row.labels), "eligible": row.eligible}
        objectives: dict[str, Any] = {}
        for metric, mean in row.found.items():
            change = row.change[metric]
            objectives |= {metric: mean.mean, f"{metric}_half": mean.half}
            objectives |= {f"{metric}_diff": change.mean, f"{metric}_diff_half": change.half}
        others = {name: row.mean(name) for name in FIGURES if name not in row.found}
        return {**facts, "on_front": row.front, "tied": row.tied, **row.assignment, **objectives, **others}

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row a run: configuration, replication, what was set, every figure."""
        rows = [
            {"config": row.config, "replication": run["replication"], **row.assignment, **run.get("figures", {})}
            for row in self.found.rows
            for run in row.runs
        ]
        return pd.DataFrame(rows).sort_values(["config", "replication"], ignore_index=True)

    @property
    def pareto(self) -> pd.DataFrame:
        """The configurations that no other beats in every objective."""
        return self.table[self.table.on_front]

    @property
    def knobs(self) -> list[str]:
        """The keys that take more than one value."""
        return list(self.found.experiment.knobs)

    @property
    def winner(self) -> int:
        """The number of the best configuration that may win."""
        if self.found.winner is None:
            raise BadInput(f"sweep {self.found.experiment.name}: no configuration may win")
        return self.found.winner.config

    def scenario(self, config: Optional[int] = None) -> Tree:
        """Return a configuration's scenario, the winner's if none is named; `servesim.run` takes it as it is."""
        return self.found.experiment.tree(self.winner if config is None else config)

    def run(self, config: Optional[int] = None, replication: int = 0, turns: bool = False) -> Result:
        """Make one of the sweep's runs again, for a closer look; the winner's first if none is named, 0 the baseline's.

        Runs of the same replication meet the same requests.
        """
        task = self.found.experiment.task(self.winner if config is None else config, replication)
        return run_scenario(Bench(self.found.experiment.base).scenario(task), None, turns)

    def curve(self, knob: str, metric: Optional[str] = None) -> pd.DataFrame:
        """Return what each value of a knob reaches in a figure, the first objective's if none is named.

        `best` is the best with the other knobs free, `alone` the winner with this knob alone changed; `_half` are the
        half-widths of their paired differences to the winner: what reaches the winner's level cannot be told from it.
        Configurations that may not win are left out.
        """
        if knob not in self.knobs:
            raise BadInput(f"knob {knob!r}: takes one value only, or none; known: {', '.join(self.knobs)}")
        goal = objective(self.found.experiment.objectives[0].metric if metric is None else metric)
        winner = self.found.rows[0].assignment
        points = {}
        for value in self.found.experiment.knobs[knob]:
            with_it = [row for row in self.found.rows if row.eligible and row.assignment.get(knob) == value]
            best = min(with_it, key=lambda row: goal.sign * row.mean(goal.metric), default=None)
            alone = next((row for row in with_it if row.assignment == {**winner, knob: value}), None)
            points[value] = {**self._point("best", best, goal.metric), **self._point("alone", alone, goal.metric)}
        frame = pd.DataFrame.from_dict(points, orient="index").rename_axis(knob)
        numbers = all(type(value) in (int, float) for value in points)
        return frame.sort_index() if numbers else frame

    def sentence(self, knob: str, metric: Optional[str] = None) -> str:
        """Say in words what a curve shows: the best value of a knob, and what the worst one costs."""
        metric = self.found.experiment.objectives[0].metric if metric is None else metric
        best = self.curve(knob, metric).best.dropna()
        if best.empty:
            return f"{metric} is not known for any value of {knob}."
        order = best.sort_values(ascending=objective(metric).goal == "min", kind="stable")
        first, last = order.iloc[0], order.iloc[-1]
        apart = abs(last - first) / abs(first) if first else float(last != first)
        if apart < ALIKE:
            return f"{metric} can be {shown_as(first, metric)} with any value of {knob}."
        far = f"{apart:.1%} off" if apart < 1 else f"{1 + apart:.1f} times as much"
        return (
            f"{metric} is best with {knob} {order.index[0]} ({shown_as(first, metric)}) and worst with "
            f"{order.index[-1]} ({shown_as(last, metric)}, {far})."
        )

    def _point(self, name: str, row: Optional[Row], metric: str) -> dict[str, float]:
        winner = self.found.winner
        if row is None or winner is None:
            return {name: np.nan, f"{name}_half": np.nan}
        half = self.found.difference(row, winner, metric).half
        return {name: row.mean(metric), f"{name}_half": np.nan if half is None else half}

    def report(self, path: Union[str, Path]) -> None:
        """Write report.html: one page that works offline."""
        write_report(self.found, Path(path))

    def __repr__(self) -> str:
        experiment = self.found.experiment
        return f"Sweep({experiment.name}: {len(self.found.rows)} configurations, {self.found.runs} runs)"


@dataclass(frozen=True)
class Replay:
    """One setting, simulated and measured."""

    name: str
    simulated: Result
    measured: Result
    comparison: Comparison = field(repr=False)
    profile: Profile = field(repr=False)  # what the simulation took steps to cost, the host's part included
    calls: Sequence[ModelCall] = field(default=(), repr=False)

    @cached_property
    def errors(self) -> pd.DataFrame:
        """A row a figure: both sides, the relative error, and its parts from step times and from decisions."""
        lines = {line.metric: line.as_dict() for line in self.comparison.lines}
        return pd.DataFrame.from_dict(lines, orient="index").astype(float).rename_axis("metric")

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request that finished on both sides: latencies simulated and measured."""
        names = ["ttft", "tpot", "e2el"]
        sides = {"simulated": self.simulated.requests, "measured": self.measured.requests}
        done = {name: side[side.outcome == "finished"] for name, side in sides.items()}
        keyed = {name: side.set_index(side.index.map(str)) for name, side in done.items()}
        latencies: list[pd.DataFrame | pd.Series[Any]] = [
            side[names].add_suffix(f"_{name}") for name, side in keyed.items()
        ]
        return keyed["measured"][["arrival", "prompt", "output"]].join(latencies, how="inner")

    @cached_property
    def steps(self) -> pd.DataFrame:
        """A row a measured model call: when, how long, how long the profile says, and its shape."""
        columns = ["start", "called", "end", *Shape._fields]
        frame = pd.DataFrame([call.flat() for call in self.calls], columns=columns)
        shapes = [call.shape for call in self.calls]
        frame["seconds"] = frame.end - frame.start
        frame["predicted"] = [self.profile.cost.seconds(shape) for shape in shapes]
        frame["kind"] = [shape.kind for shape in shapes]
        return frame

    def __repr__(self) -> str:
        error = self.comparison.line("makespan").error
        return f"Replay({self.name}: makespan {self.measured.figures['makespan']:.2f} s, simulated {error or 0:+.2%})"


def shown_as(value: float, metric: str) -> str:
    """Return a figure with its unit, for people."""
    return spread(Interval(value, None, 1), metric)


def replay_of(replayed: Replayed) -> Replay:
    """Return a replay as frames."""
    assert replayed.run is not None
    assert replayed.simulated is not None
    assert replayed.comparison is not None
    simulated = result_of(replayed.run, replayed.simulated.decisions)
    measured = result_of(replayed.live, replayed.live.decisions or None)
    calls = replayed.live.model_calls
    return Replay(replayed.name, simulated, measured, replayed.comparison, replayed.run.profile, calls)
