"""The result of a replay as pandas frames. Times are seconds, except metrics whose names end in _ms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd
from servesim.core import Shape
from servesim.files.step_table import ModelCall
from servesim.report.trust import policy_note
from servesim.statistics.number_format import format_metric
from servesim.study.columns import html_result

from .run import Result, result_of

if TYPE_CHECKING:
    from servesim.calibrate.replay.replay import ReplayedScenario
    from servesim.calibrate.replay.verify import Comparison
    from servesim.costs.device_profile import Profile


@dataclass(frozen=True)
class ReplayResult:
    """One scenario, simulated and measured."""

    name: str
    simulated: Result
    measured: Result
    comparison: Comparison = field(repr=False)
    profile: Profile = field(repr=False)  # step costs of the simulation, with host overhead
    calls: Sequence[ModelCall] = field(default=(), repr=False)

    @cached_property
    def errors(self) -> pd.DataFrame:
        """One row per metric: both values, the error, and its parts from step times and from decisions."""
        rows = {line.metric: line.as_dict() for line in self.comparison.rows}
        return pd.DataFrame.from_dict(rows, orient="index").astype(float).rename_axis("metric")

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request that finished in both runs: simulated and measured latencies."""
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
        """One row per measured model call: times, measured and predicted seconds, and step shape."""
        columns = ["start", "called", "end", *Shape._fields]
        frame = pd.DataFrame([call.flat() for call in self.calls], columns=columns)
        shapes = [call.shape for call in self.calls]
        frame["seconds"] = frame.end - frame.start
        frame["predicted"] = [self.profile.cost.seconds(shape) for shape in shapes]
        frame["kind"] = [shape.kind for shape in shapes]
        return frame

    def __repr__(self) -> str:
        row = self.comparison.rows[0]
        level = "–" if row.measured is None else format_metric(row.measured, row.metric)
        return f"ReplayResult({self.name}: {row.metric} {level}, simulated {row.error or 0:+.2%})"

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        errors = self.errors.error.dropna()
        if errors.empty:
            return "The two runs have no metric in common."
        worst, lead = str(errors.abs().idxmax()), self.comparison.rows[0].metric
        leading = f"The error of {lead} is {errors[lead]:+.2%}. " if lead in errors else ""
        return f"{leading}The largest error is {errors[worst]:+.2%} ({worst})."

    def _repr_html_(self) -> str:
        cells = [["metric", "simulated", "measured", "error"]]
        for metric, row in self.errors.iterrows():
            levels = [format_metric(row[side], str(metric)) for side in ("simulated", "measured")]
            cells.append([str(metric), *levels, "" if pd.isna(row.error) else f"{row.error:+.2%}"])
        return html_result(f"Replay: {self.name}", cells, [self.verdict, policy_note([self.simulated.scenario])])


def replay_of(replayed: ReplayedScenario) -> ReplayResult:
    """Return a replay as frames."""
    assert replayed.run is not None
    assert replayed.simulated is not None
    assert replayed.comparison is not None
    simulated = result_of(replayed.run, replayed.simulated.decisions)
    measured = result_of(replayed.live, replayed.live.decisions or None)
    calls = replayed.live.model_calls
    return ReplayResult(replayed.name, simulated, measured, replayed.comparison, replayed.run.profile, calls)
