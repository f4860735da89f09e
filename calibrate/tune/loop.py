"""The closed loop of `sim tune`: sweep, measure, correct the profile, and sweep again.

A folder holds one tuning run: tune.json (what it depends on), tune.jsonl (choices and measurements), live/ (measured
runs) and round-N/ (the sweep of each round, and its profile from the second round on). The choices depend only on these
files, so a resumed run continues where it was killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Optional

from servesim.calibrate.replay.measured_run import write_live
from servesim.calibrate.replay.replay import expected_seconds, replay_requests
from servesim.calibrate.replay.verify import setting_notes
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Shape
from servesim.costs.device_profile import Profile, load_profile
from servesim.files.write import write_yaml
from servesim.runs.run_folder import read_run
from servesim.statistics.objective import Objective
from servesim.study.executor import Executor
from servesim.study.experiment import Experiment
from servesim.study.experiment_file import open_folder
from servesim.study.progress import Progress
from servesim.study.ranking import Summary
from servesim.study.single_run import RunContext
from servesim.study.sweep import sweep

from .choice import (
    OPEN_GAIN,
    PRIOR_SPREAD,
    Candidate,
    adjusted,
    choose,
    drawn_costs,
    find_twins,
    leading_rows,
    measured_ratios,
    prefer_measured,
    rate,
    same_order,
    scaled_values,
    scatter_of,
    scattered,
    simulate_draws,
    with_twins,
)
from .correction import Correction, correct_from_requests, correct_from_steps, on_device
from .journal import Measurement, TuneJournal
from .results import Round, TuneResult, write_corrected
from .setup import Settings
from .step_times import in_parts, visited_shapes
from .targets import LiveTarget

TERMS_FILE, NEXT_FILE = "tune.json", "next.yaml"
WAITING = "the server must be started with another configuration"
BUDGET = "the device time is spent"
STABLE = "the order of the leaders is stable"
SETTLED = "no further measurement is expected to change the leader"


class Tuner:
    """A tuning run in a folder."""

    def __init__(
        self,
        experiment: Experiment,
        target: LiveTarget,
        folder: Path,
        executor: Executor,
        settings: Settings,
        say: Optional[Callable[[str], None]] = None,
    ) -> None:
        self.experiment = experiment
        self.target = target
        self.folder = folder
        self.executor = executor
        self.settings = settings
        self.quiet = say is None
        self.say = say or (lambda line: None)
        self.start_profile = load_profile(experiment.profile)
        self.rounds: list[Round] = []
        self.overhead = 0.0  # device seconds of a measurement beyond its run: loading, warm-up

    @property
    def objective(self) -> Objective:
        """The first objective."""
        return self.experiment.objectives[0]

    def run(self, terms: Mapping[str, Any], resume: bool) -> TuneResult:
        """Run rounds until one of the limits. `terms` are the options that a resumed run must repeat."""
        terms = {**self.experiment.as_json(), **terms}
        open_folder(self.folder, TERMS_FILE, terms, resume, "tuning run", "use another -o")
        self.rounds.clear()
        with TuneJournal(self.folder) as self.journal:
            while True:
                self.rounds.append(self._next_round())
                reason = self._measure_round(self.rounds[-1])
                if reason is not None:
                    waiting = self.folder / NEXT_FILE if reason == WAITING else None
                    return TuneResult(self.rounds, reason, self.journal.measurements, waiting)

    def missing(self, number: int) -> list[tuple[int, str]]:
        """Return the measurements of a round that are not made: configuration, and name without the round."""
        done = [m.name for m in self.journal.of_round(number)]
        missing = []
        for config in self.journal.chosen.get(number, []):
            name = f"config{config}" if config else "config0-baseline"
            names = [name, *(f"{name}-{k}" for k in range(2, self.settings.repeat + 1))]
            missing += [(config, name) for name in names if name not in done]
        return missing

    def _next_round(self) -> Round:
        """Sweep with the profile of this round, and rate the leaders over draws of the cost model."""
        number = len(self.rounds) + 1
        correction = self.rounds[-1].correction if self.rounds else None
        profile, spread = self.start_profile, PRIOR_SPREAD
        experiment = self.experiment
        if correction is not None:
            profile, spread = load_profile(self._profile_folder(number)), correction.spread
            experiment = experiment.changed(base={**experiment.base, "profile": str(self._profile_folder(number))})
        self.say(f"round {number}: {len(experiment.configs)} configurations, profile {profile.path or profile.name}")
        folder = self.folder / f"round-{number}" / "sweep"
        with Progress("sweep", self.quiet) as progress:
            records = sweep(experiment, folder, self.executor, resume=True, progress=progress)
        measurements, twins = [m for m in self.journal.measurements if m.round < number], find_twins(records)
        ratios = measured_ratios(records, measurements)
        metric = self.objective.metric
        scatter = scatter_of(metric, records, measurements)
        summary = Summary(experiment, adjusted(records, ratios))
        prefer_measured(summary, [m.config for m in measurements if not m.stopped], twins)
        if summary.winner is None:
            errors = [run["error"] for run in summary.failures]
            raise BadInput(f"no configuration can win: {errors[0] if errors else 'all get stuck or serve no request'}")
        rows = leading_rows(summary, self.settings.top)
        parts = in_parts(profile.cost, self._shapes, profile.about)
        costs = drawn_costs(profile, parts, spread, self.settings.draws)
        drawn, failures = simulate_draws(experiment, rows, profile, costs, self.executor)
        values = scattered(scaled_values(drawn, ratios, metric), scatter, Counter(self._known()), twins)
        candidates = [self._with_seconds(c, profile) for c in rate(values, summary.winner.config, twins)]
        return Round(number, summary, candidates, self.settings.draws, scatter, failures)

    def _with_seconds(self, candidate: Candidate, profile: Profile) -> Candidate:
        """Return a candidate with its expected device time, unless it was measured."""
        if candidate.config in self._known():
            return candidate
        scenario = self.scenario(candidate.config)
        seconds = expected_seconds(scenario, replay_requests(scenario, split=False), profile)
        return replace(candidate, seconds=seconds + self.overhead)

    @cached_property
    def _shapes(self) -> list[Shape]:
        """Step shapes that the configurations visit; of all of them, since every one can become a leader."""
        configs = range(len(self.experiment.configs))
        return visited_shapes((self.scenario(c) for c in configs[:: max(1, len(configs) // 32)]), self.start_profile)

    def scenario(self, config: int) -> Scenario:
        """Return the scenario of a configuration."""
        return scenario_from(self.experiment.tree(config), f"configuration {config}")

    def _known(self) -> list[int]:
        return [m.config for m in self.journal.measurements if not m.stopped]

    def _profile_folder(self, number: int) -> Path:
        return self.folder / f"round-{number}" / "profile"

    def _measure_round(self, current: Round) -> Optional[str]:
        """Measure the choice of a round and correct the profile; return the reason if the loop ends instead."""
        number, new = current.number, current.number not in self.journal.chosen
        if new:
            chosen, reason = self._choose(current)
            if reason is not None:
                return reason
            self.journal.choose(number, chosen)
        if not self.target.ready and number > 1 and new:
            write_yaml(self.folder / NEXT_FILE, self.experiment.tree(self.journal.chosen[number][0]))
            return WAITING
        for config, name in self.missing(number):
            left = self.settings.device_seconds - self.journal.device_seconds
            if left <= 0:  # the next rounds may choose the rest, with another budget
                self.journal.choose(number, list(dict.fromkeys(m.config for m in self.journal.of_round(number))))
                break
            self._measure(number, config, name, current, left)
        current.measured = self.journal.of_round(number)
        current.correction = self._correct(number) if current.measured else None
        return BUDGET if current.correction is None else None

    def _choose(self, current: Round) -> tuple[list[int], Optional[str]]:
        """Return what to measure, or the reason why the loop ends."""
        settings = self.settings
        known = with_twins(self._known(), current.candidates)
        if current.number > settings.rounds:
            return [], f"the limit of {settings.rounds} rounds"
        leader = current.leader.config
        open_gain = max((c.gain for c in current.candidates if c.config not in known), default=0.0)
        if leader in known and open_gain <= OPEN_GAIN and self._stable():
            return [], STABLE
        required = [leader, 0] if current.number == 1 else [leader]
        top = settings.top if self.target.ready else 1
        if not self.target.ready and current.number == 1:
            required = [0]  # the server runs the baseline
        chosen = choose(current.candidates, required, self._known(), top)[: None if self.target.ready else 1]
        if not chosen:
            return [], STABLE if self._stable() else SETTLED
        fitting = self._within_budget(chosen, {c.config: c.seconds for c in current.candidates})
        return (fitting, None) if fitting else ([], BUDGET)

    def _within_budget(self, chosen: list[int], seconds: Mapping[int, float]) -> list[int]:
        """Return the configurations whose expected device time fits into the budget, one after the other."""
        left, fitting = self.settings.device_seconds - self.journal.device_seconds, []
        for config in chosen:
            needed = self.settings.repeat * seconds[config]
            if needed <= left:
                fitting.append(config)
                left -= needed
        return fitting

    def _stable(self) -> bool:
        """Whether there are two rounds, and the leaders of the last two have the same order."""
        if len(self.rounds) < 2:
            return False
        before, after = (one.summary for one in self.rounds[-2:])
        metric, sign = self.objective.metric, self.objective.sign
        values = {row.config: sign * row.means[metric].mean for row in after.rows if row.eligible}
        return same_order([row.config for row in before.rows if row.eligible], values, self.settings.top)

    def _measure(self, number: int, config: int, name: str, current: Round, left: float) -> None:
        """Measure one configuration, write its files, and then record it."""
        row = next(row for row in current.summary.rows if row.config == config)
        scenario, folder = self.scenario(config), self.folder / "live" / f"round{number}-{name}"
        file = folder.with_suffix(".yaml")
        write_yaml(file, self.experiment.tree(config))
        candidate = next(c for c in current.candidates if c.config == config)
        self.say(
            f"round {number}: measuring {name} ({row.label}), about {candidate.seconds:.0f} s; "
            f"best in {candidate.wins} of {current.draws} draws, expected gain {100 * candidate.gain:.2f} %"
        )
        live, seconds = self.target.measure(name, scenario, file, self.start_profile, left)
        if live.stopped and seconds < left:
            raise KeyboardInterrupt
        write_live(live, folder)
        self.overhead = max(0.0, seconds - live.end)
        context = RunContext(self.experiment.base, self.experiment.steady_window)
        metrics = {} if live.stopped or live.stuck else context.record(live)["metrics"]
        if metrics.get("completed") == 0:  # the server died: --resume must measure the configuration again
            raise BadInput(f"{name}: no request was finished, so the measurement does not count; see {folder}")
        differs = setting_notes(scenario, live.extra.get("server_settings", {}))
        for text in differs:
            self.say(f"round {number}: {name}: {text}")
        predicted = row.runs[0].get("metrics", {}) if row.runs else {}  # of the run that is measured: the first one
        self.journal.add(
            Measurement(
                round=number, config=config, name=name, seconds=seconds, metrics=metrics, predicted=predicted,
                stopped=live.stopped, differs=differs,
            )
        )  # fmt: skip

    def _correct(self, number: int) -> Optional[Correction]:
        """Correct the profile with all measurements so far, and write that of the next round. None without any step."""
        names = [f"round{m.round}-{m.name}" for m in self.journal.measurements if m.round <= number]
        runs = {name: read_run(self.folder / "live" / name) for name in names}
        profile = self.start_profile
        if self.target.host_separate:  # a real device: the new profile describes it, not that of the start profile
            profile = on_device(profile, next(iter(runs.values())).result.get("backend"), self.say)
        if self.target.has_steps:
            calls = {name: run.calls for name, run in runs.items() if run.calls}
            if not calls:  # the device time ended in a warm-up
                return None
            correction = correct_from_steps(profile, calls, self._shapes, self.target.host_separate)
        else:
            correction = correct_from_requests(profile, list(runs.values()), self._shapes)
        if correction.note:
            self.say(f"round {number}: {correction.note}")
        write_corrected(self._profile_folder(number + 1), correction)
        return correction
