"""Rounds of a tuning run, and the files that it leaves for its user: rounds.csv, profile/, best.yaml, summary.csv."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from servesim.calibrate.probe.sample_set import write_samples
from servesim.costs.device_profile import write_profile
from servesim.files.terminal import PLAIN, Screen, align_columns
from servesim.files.write import comment, open_text, replacing, write_rows, write_text
from servesim.statistics.number_format import format_mean
from servesim.study.ranking import Row, Summary
from servesim.study.table import write_summary

from .choice import Candidate, Scatter
from .correction import Correction
from .journal import Measurement

COLUMNS = (
    "round", "leader", "leader_settings", "objective", "predicted", "wins", "draws", "measured", "device_s",
    "objective_error", "scatter", "prefill_factor", "decode_factor",
)  # fmt: skip
PROFILE_FILES = ("samples.csv", "profile.yaml")


@dataclass
class Round:
    """A sweep, the measurements after it, and the correction from all measurements so far."""

    number: int
    summary: Summary
    candidates: Sequence[Candidate]
    draws: int
    scatter: Scatter  # of the measurements before it
    failures: Sequence[str] = ()  # why simulations with random cost models failed
    measured: list[Measurement] = field(default_factory=list)
    correction: Optional[Correction] = None

    @property
    def leader(self) -> Row:
        """The best configuration of the sweep."""
        assert self.summary.winner is not None
        return self.summary.winner

    @property
    def metric(self) -> str:
        """The first objective."""
        return self.summary.experiment.objectives[0].metric

    @property
    def wins(self) -> int:
        """The draws in which the leader is the best."""
        return next(c.wins for c in self.candidates if c.config == self.leader.config)

    @property
    def objective_error(self) -> float:
        """Mean of |predicted / measured - 1| of the objective, of the runs of this round; NaN without any."""
        errors = [
            abs(m.predicted[self.metric] / m.metrics[self.metric] - 1)
            for m in self.measured
            if m.metrics.get(self.metric) and self.metric in m.predicted
        ]
        return sum(errors) / len(errors) if errors else math.nan


@dataclass
class TuneResult:
    """All rounds, and why there are no more."""

    rounds: list[Round]
    reason: str
    measurements: Sequence[Measurement]
    needs_server: Optional[Path] = None  # scenario that the server must run before the next measurement

    @property
    def summary(self) -> Summary:
        """The sweep with the last profile."""
        return self.rounds[-1].summary

    @property
    def device_seconds(self) -> float:
        """The device time of all measurements."""
        return sum(measurement.seconds for measurement in self.measurements)

    @property
    def measured(self) -> set[int]:
        """The configurations with a complete measurement."""
        return {m.config for m in self.measurements if not m.stopped}

    @property
    def has_winner(self) -> bool:
        """Whether a configuration other than the baseline was measured."""
        return any(config != 0 for config in self.measured)

    def describe_winner(self) -> str:
        """Return whether the winner was measured."""
        config = self.rounds[-1].leader.config
        if config in self.measured:
            return "measured"
        twins = next(c.twins for c in self.rounds[-1].candidates if c.config == config)
        if known := sorted(twins & self.measured):
            return f"not measured; the simulator cannot tell it from config{known[0]}, which was measured"
        return "not measured; predicted with the corrected profile"

    def describe_scatter(self) -> str:
        """Return how far measured and predicted values are apart; empty without measurements."""
        last = self.rounds[-1]
        if not last.scatter.predicted:
            return ""
        text = f"scatter of {last.metric}: {100 * last.scatter.predicted:.1f} % between measured and predicted values"
        once = len({m.config for m in self.measurements}) == len(self.measurements)
        noise = "one measurement each: its noise is not known (--repeat)" if once else ""
        return f"{text}; {noise or f'noise of a measurement {100 * last.scatter.noise:.1f} %'}"

    def sources(self) -> list[str]:
        """Return what is measured about the winner, and what is simulated."""
        metric, config = self.rounds[-1].metric, self.rounds[-1].leader.config
        lines = []
        for name, number in [("this configuration", config), *([("the baseline", 0)] if config else [])]:
            runs = [m for m in self.measurements if m.config == number and metric in m.metrics]
            pairs = [(m.metrics[metric], m.predicted.get(metric, math.nan)) for m in runs]
            values = ", ".join(f"{value:.4g} (predicted {predicted:.4g})" for value, predicted in pairs)
            lines.append(f"{name}: {metric} measured {values}" if runs else f"{name} was not measured")
        scatter = [text] if (text := self.describe_scatter()) else []
        simulated = f"simulated, and scaled to the measured values: the {metric} and its difference below"
        return [*lines, *scatter, f"{simulated}, all other metrics, and the order of the configurations"]


def format_rounds(rounds: Sequence[Round], screen: Screen = PLAIN) -> str:
    """Return the table of the rounds as text."""
    metric = rounds[0].metric
    lines = [["round", "leader", metric, "best in draws", "measured", "device time", "error", "prefill", "decode"]]
    for row in rounds:
        factors = ["", ""] if row.correction is None else [f"x {value:.3f}" for value in row.correction.factors]
        error = row.objective_error
        lines.append([
            str(row.number), row.leader.label, format_mean(row.leader.means[metric], metric),
            f"{row.wins} of {row.draws}", ", ".join(m.name for m in row.measured) or "-",
            f"{sum(m.seconds for m in row.measured):.1f} s" if row.measured else "",
            "" if math.isnan(error) else f"{100 * error:.1f} %", *factors,
        ])  # fmt: skip
    return "\n".join(align_columns(lines, screen, ["leader", "measured"]))


def failure_warnings(rounds: Sequence[Round]) -> list[str]:
    """Return one line per round whose simulations with random cost models failed."""
    return [
        f"round {row.number}: {len(row.failures)} of {len(row.candidates) * row.draws} simulations with random cost "
        f"models failed and count as the worst result; the first: {row.failures[0]}"
        for row in rounds
        if row.failures
    ]


def setting_warnings(measurements: Sequence[Measurement]) -> list[str]:
    """Return one line per setting in which a server was not the measured configuration."""
    return [f"live/round{m.round}-{m.name}: {text}" for m in measurements for text in m.differs]


def write_rounds(path: Path, rounds: Sequence[Round]) -> None:
    """Write rounds.csv: one line per round."""
    with open_text(path) as file:
        write_rows(file, [COLUMNS])
        for row in rounds:
            factors = ["", ""] if row.correction is None else [f"{value:.6g}" for value in row.correction.factors]
            error = row.objective_error
            write_rows(file, [[
                row.number, row.leader.config, row.leader.label, row.metric,
                repr(float(row.leader.means[row.metric].mean)), row.wins, row.draws,
                " ".join(m.name for m in row.measured), f"{sum(m.seconds for m in row.measured):.3f}",
                "" if math.isnan(error) else f"{error:.6g}", f"{row.scatter.predicted:.6g}", *factors,
            ]])  # fmt: skip


def write_results(result: TuneResult, folder: Path) -> Summary:
    """Write the files; return the last sweep, with the copied profile."""
    write_rounds(folder / "rounds.csv", result.rounds)
    summary = result.summary
    source = Path(str(summary.experiment.base.get("profile")))
    if len(result.rounds) > 1:
        for name in PROFILE_FILES:
            if (source / name).exists():
                with replacing(folder / "profile" / name) as part:
                    shutil.copyfile(source / name, part)
            else:  # a file of an earlier end of this run
                (folder / "profile" / name).unlink(missing_ok=True)
        base = {**summary.experiment.base, "profile": str(folder / "profile")}
        summary.experiment = summary.experiment.changed(base=base)
    write_summary(summary, folder)
    best = folder / "best.yaml"
    write_text(best, "".join(map(comment, result.sources())) + best.read_text(encoding="utf-8"))
    return summary


def write_corrected(folder: Path, correction: Correction) -> None:
    """Write the folder. profile.yaml is written last, so a folder with one is complete. An existing one stays."""
    if (folder / "profile.yaml").exists():
        return
    samples = correction.samples
    if samples is not None and not correction.note:
        source = ["measured" if k < correction.measured else "earlier profile" for k in range(len(samples))]
        write_samples(folder / "samples.csv", samples, source=source)
    write_profile(folder, correction.profile.about, correction.profile.cost)
