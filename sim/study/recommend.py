"""From a question to settings of a server: `sim recommend`.

Two ordinary sweeps answer it. The first one runs the settings that matter for the engine at the rate of the question.
The second one finds the highest load of its winner and of the engine's defaults. Both are written as files beside the
scenario, so that `sim sweep` repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from servesim.config.families import Tuning, tunings
from servesim.config.layers import Layer, Tree, apply_assignment, assemble
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.profile_verdict import verdict_on
from servesim.files.terminal import align_columns
from servesim.files.write import write_yaml
from servesim.runs.limit import Limit, limit_of
from servesim.runs.metric_table import format_quantity, metric_title, unit_of
from servesim.runs.simulate import Run as SimulatedRun
from servesim.runs.simulate import load_trace, simulate
from servesim.statistics.constraints import Bound, parse_bounds
from servesim.traces.edit import set_rate

from .executor import Executor
from .experiment import Experiment
from .progress import Progress
from .ranking import Row, Summary
from .rate_summary import RateSummary
from .rates import Curve
from .result import Result, run_experiment, write_result
from .study_keys import SweepFile
from .sweep_file import build_experiment, validate_file

REQUESTS = 4000  # of a synthetic workload: enough for a P99
SPREAD = 0.5  # standard deviation of lengths / their mean
PRECISION = 0.02  # of the highest load
CANDIDATES = 3  # whose highest load is found if no setting meets the constraints
OBJECTIVES = ("mean_e2el_ms", "p99_ttft_ms")
SLO_OF = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2el"}  # part of a metric's name -> key of the SLO


def workload(rate: float, prompt: int, output: int, system_prompt: int = 0) -> Tree:
    """Return requests that arrive at random with lengths around means; `prompt` includes the system prompt."""
    if not 0 <= system_prompt < prompt:
        raise BadInput(f"--system-prompt: expected fewer tokens than --prompt ({prompt}), got {system_prompt}")
    own = prompt - system_prompt
    tree: Tree = {
        "requests": REQUESTS,
        "arrivals": {"kind": "poisson", "rate": rate},
        "lengths": {
            "kind": "lognormal",
            "prompt": {"mean": own, "sd": SPREAD * own, "max": 4 * own},
            "output": {"mean": output, "sd": SPREAD * output, "max": 4 * output},
        },
    }
    return tree if not system_prompt else {**tree, "prefixes": {"count": 1, "tokens": system_prompt}}


def slo_of(constraints: Sequence[str]) -> Tree:
    """Return the SLO of upper bounds of latencies: goodput counts the requests that meet them."""
    bounds: dict[str, float] = {}
    for bound in parse_bounds(constraints):
        name = bound.metric.removesuffix("_ms").rsplit("_", 1)[-1]
        if bound.metric.endswith("_ms") and name in SLO_OF and bound.sign == "<=":
            bounds[SLO_OF[name]] = bound.value
    return bounds


@dataclass(frozen=True)
class Question:
    """A load on a server, and the limits that it must meet."""

    server: str  # a name of `tunings`
    keys: Tree  # of the scenario, over those of the preset: profile, workload or trace
    constraints: Sequence[str]

    @property
    def tuning(self) -> Tuning:
        known = tunings()
        if self.server not in known:
            raise BadInput(f"--engine: expected one of {', '.join(known)}, got {self.server!r}")
        return known[self.server]

    @cached_property
    def base(self) -> Tree:
        """The scenario with the engine's defaults for the device."""
        profile = load_profile(self.keys["profile"])
        defaults = Layer(dict(self.tuning.defaults(profile.about)), are_settings=True)
        slo = slo_of(self.constraints)
        keys = {**self.keys, **({"slo": slo} if slo else {})}
        return assemble([Layer({"preset": self.tuning.preset}), defaults, Layer(keys)])

    def sweep_keys(self) -> Tree:
        """Return the keys of the first sweep."""
        params = {key: list(values) for key, values in self.tuning.params.items()}
        return {"params": params, "objectives": list(OBJECTIVES), "subject_to": list(self.constraints)}

    def capacity_keys(self, assignments: Sequence[Mapping[str, Any]], rate: float) -> Tree:
        """Return the keys of the second sweep: some settings, and the defaults as the baseline."""
        params = [{key: [value] for key, value in assignment.items()} for assignment in assignments if assignment]
        return {
            "params": params, "objectives": list(OBJECTIVES), "subject_to": list(self.constraints),
            "rates": [rate], "precision": PRECISION,
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The recommended settings, and what they give."""

    question: Question
    rate: float  # requests per second of the question
    best: Row  # at the rate of the question
    defaults: Row
    best_load: Optional[Curve]  # None without constraints
    defaults_load: Optional[Curve]
    scenario: Scenario
    profile: Profile
    limit: Limit  # of the recommended settings, at a load that is a little too high

    @property
    def changed(self) -> Mapping[str, Any]:
        """The settings that differ from the engine's defaults."""
        defaults = scenario_from(self.question.base).make_policy()
        return {
            key: value
            for key, value in self.best.assignment.items()
            if getattr(defaults, key.removeprefix("policy."), None) != value
        }


def recommend(question: Question, folder: Path, executor: Executor, progress: Progress) -> Answer:
    """Run both sweeps in a folder and return the answer."""
    base = question.base
    scenario = scenario_from(base)
    write_yaml(folder / "scenario.yaml", base)

    def run(name: str, keys: Tree) -> tuple[Experiment, Result]:
        write_yaml(folder / f"{name}.yaml", {"base": "scenario.yaml", **keys})
        experiment = build_experiment(validate_file(SweepFile, keys, name, {}), base, name)
        result = run_experiment(experiment, folder / name, executor, True, progress)
        write_result(result, folder / name)
        return experiment, result

    experiment, summary = run("sweep", question.sweep_keys())
    assert isinstance(summary, Summary)
    rate, best, curves = experiment.own_rate(0), summary.rows[0], []
    if question.constraints:
        tried = [best] if best.eligible else [*summary.rows[:CANDIDATES], summary.baseline]
        _, loads = run("capacity", question.capacity_keys([row.assignment for row in tried], rate))
        assert isinstance(loads, RateSummary)
        curves = loads.curves  # highest load first
        best = next(row for curve in curves for row in tried if row.assignment == curve.assignment)
    best_load = next((curve for curve in curves if curve.assignment == best.assignment), None)
    defaults_load = next((curve for curve in curves if curve.is_baseline), None)
    chosen = scenario_from(apply_assignment(base, best.assignment))
    limit = limit_of(simulate_at(chosen, too_high(best_load, rate)))
    profile = load_profile(scenario.profile)
    return Answer(question, rate, best, summary.baseline, best_load, defaults_load, chosen, profile, limit)


def too_high(curve: Optional[Curve], rate: float) -> float:
    """Return a rate at which the limit of a configuration shows: the lowest one that misses the constraints."""
    capacity = None if curve is None else curve.capacity
    return rate if capacity is None or capacity.missed_at is None else capacity.missed_at


def simulate_at(scenario: Scenario, rate: float) -> SimulatedRun:
    """Run a scenario at a request rate."""
    return simulate(scenario, set_rate(load_trace(scenario), rate))


SHOWN = ("p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "request_goodput")
DERIVED_ERRORS = {"e2el": 0.037, "ttft": 0.05, "tpot": 0.037}  # medians of 25 runs of others: docs/proof.md


def answer_text(answer: Answer, command: str, next_command: str) -> str:
    """Return the answer as one screen; `command` starts the server with the recommended settings."""
    lines = [verdict_line(answer), "", command.rstrip(), "", *result_table(answer), ""]
    lines += [f"What limits it: {answer.limit.text}", error_line(answer), f"Next: {next_command}"]
    return "\n".join(lines)


def verdict_line(answer: Answer) -> str:
    """Return the recommended settings, and whether they meet the limits at the rate of the question."""
    settings = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in answer.changed.items())
    choice = f"Best settings at {answer.rate:g} req/s: {settings}" if settings else "The defaults are the best settings"
    if not answer.question.constraints:
        return f"{choice}."
    limits = " and ".join(map(str, answer.question.constraints))
    if answer.best.eligible:
        return f"{choice}. They meet {limits}."
    return (
        f"No tested setting meets {limits} at {answer.rate:g} req/s. "
        f"The highest load within the limits has {settings or 'the defaults'}."
    )


def result_table(answer: Answer) -> list[str]:
    """Return the metrics of the recommended settings beside those of the engine's defaults."""
    rows = [["at this load" if answer.changed else "", "recommended", "defaults"]]
    for metric in SHOWN:
        means = [row.mean(metric) for row in (answer.best, answer.defaults)]
        if not all(map(math.isnan, means)):
            unit = unit_of(metric, means)
            rows.append([unit.after(metric_title(metric)), *(format_quantity(mean, None, unit) for mean in means)])
    if answer.best_load is not None or answer.defaults_load is not None:
        loads = (answer.best_load, answer.defaults_load)
        rows.append(["Highest load (req/s)", *(load_text(curve) for curve in loads)])
    return align_columns(rows if answer.changed else [row[:2] for row in rows])


def load_text(curve: Optional[Curve]) -> str:
    """Return the highest load of a configuration that meets the limits."""
    capacity = None if curve is None else curve.capacity
    return "–" if capacity is None else capacity.text.removesuffix(" req/s")


def error_line(answer: Answer) -> str:
    """Return the expected error, and whether the limits are farther away than it."""
    profile = answer.profile
    if not profile.about.get("derived"):
        return f"Expected error: profile {profile.name} is {verdict_on(profile).text}."
    errors = ", ".join(f"{name.upper()} {100 * error:.1f} %" for name, error in DERIVED_ERRORS.items())
    text = f"Expected error: {errors} (medians of 25 runs of others with derived step times, docs/proof.md)"
    bounds = [bound for bound in parse_bounds(answer.question.constraints) if not bound.of_baseline]
    close = [bound for bound in bounds if is_close(bound, answer.best.mean(bound.metric))]
    if not bounds:
        return f"{text}."
    return f"{text}; {close[0]} is within it: measure first." if close else f"{text}; the limits are outside of it."


def is_close(bound: Bound, value: float) -> bool:
    """Whether a value with the expected error may be on the other side of a bound."""
    error = next((size for name, size in DERIVED_ERRORS.items() if name in bound.metric), max(DERIVED_ERRORS.values()))
    return bound.verdict(value * (1 - error), value * (1 + error)) == "undecided"
