"""From a question to settings of a server: `sim recommend`.

Ordinary sweeps answer it. The first one runs the settings that matter for the engine at the rate of the question. The
second one finds the highest load of its winner and of the engine's defaults. If other settings are as good at this
rate, a third one runs them at a higher rate; if one of them meets the constraints there, it holds more load and wins.
All of them are written as files beside the scenario, so that `sim sweep` repeats them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from servesim.config.exported import recorded_server
from servesim.config.families import Tuning, tunings
from servesim.config.layers import Layer, Tree, apply_assignment, assemble
from servesim.config.scenario import Scenario, Slo, scenario_from
from servesim.core import BadInput
from servesim.core.limits import MAX_RANKS
from servesim.costs.device_profile import Profile, load_profile
from servesim.files.write import write_yaml
from servesim.runs.limit import Limit, limit_of
from servesim.runs.request_rate import round_rate
from servesim.runs.simulate import Run as SimulatedRun
from servesim.runs.simulate import load_trace, simulate
from servesim.statistics.constraints import parse_bounds
from servesim.traces.edit import set_rate

from .draft_question import COUNTS, DRAFT_METRIC, LOADS, TOKENS, DraftLoads, draft_loads, with_drafts, without_drafts
from .executor import Executor
from .fleet_question import Fleet, FleetSearch, routers_for
from .pilot_runs import OVERLOAD
from .progress import Progress
from .ranking import Row, Summary
from .rate_summary import RateSummary
from .rates import Curve
from .result import run_experiment
from .study_keys import SweepFile
from .sweep_file import build_experiment, validate_file
from .table import write_summary

REQUESTS = 4000  # of a synthetic workload: enough for a P99
SPREAD = 0.5  # standard deviation of lengths / their mean
PRECISION = 0.04  # of the highest load, and smallest difference of latencies that counts: about the expected error
NEAR_OVERLOAD = (0.9, 1.05)  # first rates of the highest load / throughput with all requests at once
MORE_LOAD = 1.1  # settings that are as good at the rate of the question must hold this much more load to win
CANDIDATES = 3  # whose highest load is found if no setting meets the constraints
SECTIONS = ("policy", "engine", "speculative")  # of a recorded server
OBJECTIVES = ("mean_e2el_ms", "p99_ttft_ms")


def workload(rate: float, prompt: int, output: int, system_prompt: int = 0) -> Tree:
    """Return requests that arrive at random with lengths around means; `prompt` includes the system prompt."""
    for name, tokens in (("prompt", prompt), ("output", output)):
        if tokens < 1:
            raise BadInput(f"--{name}: expected at least 1 token, got {tokens}")
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
        if bound.metric.endswith("_ms") and name in Slo.model_fields and bound.sign == "<=":
            bounds[name] = bound.value
    return bounds


@dataclass(frozen=True)
class Question:
    """A load on a server, and the limits that it must meet."""

    server: str  # a name of `tunings`
    keys: Tree  # of the scenario, over those of the preset: profile, workload or trace
    constraints: Sequence[str]
    replicas: Optional[int] = None  # 1: one server, whatever the load
    routers: Sequence[str] = ()  # to compare; empty: those of the engine

    def __post_init__(self) -> None:
        if self.replicas is not None and not 1 <= self.replicas <= MAX_RANKS:
            raise BadInput(f"--replicas: expected a number from 1 to {MAX_RANKS}, got {self.replicas}")

    @property
    def tuning(self) -> Tuning:
        return tunings()[self.server]

    @cached_property
    def base(self) -> Tree:
        """The scenario with the engine's defaults for the device and the requests."""
        slo = slo_of(self.constraints)
        layers = [Layer({"preset": self.tuning.preset}), Layer({**self.keys, **({"slo": slo} if slo else {})})]
        scenario = scenario_from(assemble(layers))
        server, about = recorded_server(scenario), load_profile(scenario.profile).about
        if server is not None:  # of `sim calibrate vllm`: its settings are the defaults
            return assemble([layers[0], Layer({key: server[key] for key in SECTIONS if key in server}), layers[1]])
        defaults = self.tuning.defaults(about, load_trace(scenario).requests)
        return assemble([layers[0], Layer(dict(defaults), are_settings=True), layers[1]])

    @property
    def grids(self) -> Sequence[Mapping[str, Sequence[Any]]]:
        """The settings that are tried."""
        if "speculative" not in self.keys:
            return self.tuning.grids
        return with_drafts(self.tuning.grids, self.keys["speculative"]["method"])

    def sweep_keys(self, grids: Sequence[Mapping[str, Sequence[Any]]]) -> Tree:
        """Return the keys of a sweep of some settings; the baseline has the defaults."""
        params = [{key: list(values) for key, values in grid.items()} for grid in grids if grid]
        return {
            "params": params, "objectives": list(OBJECTIVES), "subject_to": list(self.constraints),
            "indifference": PRECISION,
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
    for_load: bool  # the settings are as good as others at the rate of the question; they hold more load
    scenario: Scenario
    profile: Profile
    limit: Limit  # of the recommended settings, at the next rate
    limit_rate: float  # the lowest tested one that misses the constraints
    fleet: Optional[Fleet] = None  # if one replica does not hold the load, or the user asks for more
    drafts: Optional[DraftLoads] = None  # if the user has a drafter

    @property
    def holds(self) -> bool:
        """Whether the answer meets the constraints."""
        return self.best.eligible if self.fleet is None else self.fleet.holds

    @property
    def changed(self) -> Mapping[str, Any]:
        """The settings that differ from the engine's defaults."""
        defaults = scenario_from(self.question.base).make_policy()
        return {
            key: value
            for key, value in self.best.assignment.items()
            if getattr(defaults, key.removeprefix("policy."), None) != value
        }


@dataclass(frozen=True)
class Search:
    """The sweeps of one question, in a folder."""

    question: Question
    folder: Path
    executor: Executor
    progress: Progress

    def run(self, name: str, keys: Tree, other: Optional[Tree] = None) -> Any:
        """Run a sweep and write its files; with another base, also its scenario. Return a Summary, or a RateSummary."""
        base = self.question.base if other is None else other
        file = "scenario.yaml" if other is None else f"scenario-{name}.yaml"
        write_yaml(self.folder / file, base)
        write_yaml(self.folder / f"{name}.yaml", {"base": file, **keys})
        experiment = build_experiment(validate_file(SweepFile, keys, name, {}), base, name)
        result = run_experiment(experiment, self.folder / name, self.executor, True, self.progress)
        write_summary(result, self.folder / name)
        return result

    def capacities(self, name: str, rows: Sequence[Row], rate: float) -> RateSummary:
        """Return the loads of some settings and of the defaults, the highest load first."""
        rates = self.rates(rows[0], rate, NEAR_OVERLOAD)
        keys = self.question.sweep_keys([as_grid(row) for row in rows])
        loads: RateSummary = self.run(name, {**keys, "rates": rates, "precision": PRECISION})
        return loads

    def rates(self, row: Row, rate: float, parts: Sequence[float]) -> list[float]:
        """Return the rate of the question, and parts of the throughput with all requests at once."""
        overload = simulate_at(self.scenario(row), OVERLOAD * rate).measures.as_result()["request_throughput"]
        return sorted({rate, *(round_rate(part * overload, 3) for part in parts if overload)})

    def drafts(self, summary: Summary, best: Row, rate: float) -> Optional[DraftLoads]:
        """Return what drafts change at several loads: as many as recommended, or else the best number."""
        drafted = [row for row in summary.rows if row.assignment.get(TOKENS)]
        if not drafted:
            return None
        first = best if best in drafted else drafted[0]
        tokens, settings = first.assignment[TOKENS], without_drafts(best.assignment, first.assignment)
        base = apply_assignment(self.question.base, settings)
        keys = {"params": {TOKENS: [tokens]}, "objectives": [DRAFT_METRIC], "rates": self.rates(best, rate, LOADS)}
        loads: RateSummary = self.run("drafts", keys, base)
        return draft_loads(base["speculative"]["method"], tokens, first is best, loads)

    def holds_more(self, summary: Summary, best: Row, curve: Curve) -> Optional[Row]:
        """Return the best row at a higher load, of those that are as good as the winner at the rate of the question."""
        tied = [row for row in summary.rows if row.eligible and row is not best and row.relation.tied]
        if not tied or curve.capacity is None or curve.capacity.missed_at is None or not curve.capacity.rate:
            return None
        limit = limit_of(simulate_at(self.scenario(best), curve.capacity.missed_at))
        if limit.kind == "compute" and all("ttft" in bound for bound in self.question.constraints):
            return None  # no setting moves this limit; with fewer slots, tokens come faster, but the first one later
        rate = round_rate(MORE_LOAD * curve.capacity.rate, 3)
        key = "trace.rate" if "trace" in self.question.base else "workload.arrivals.rate"
        faster = apply_assignment(self.question.base, {key: rate})
        more: Summary = self.run("more", self.question.sweep_keys([as_grid(row) for row in tied]), faster)
        first = more.rows[0]
        found = first.eligible and not first.is_saturated and not more.baseline.eligible
        return next((row for row in tied if found and row.assignment == first.assignment), None)

    def scenario(self, row: Row) -> Scenario:
        return scenario_from(apply_assignment(self.question.base, row.assignment))

    def fleet(self, best: Row, curve: Optional[Curve], rate: float) -> Optional[Fleet]:
        """Return replicas that hold the load: the given number, or the smallest one if one replica does not hold it."""
        fixed = self.question.replicas
        one_holds = best.eligible and not (best.is_saturated and not self.question.constraints)
        if fixed == 1 or (fixed is None and one_holds):
            return None
        base = apply_assignment(self.question.base, best.assignment)
        routers = routers_for(self.question.server, base, self.question.routers)

        def sweep(name: str, grids: Sequence[Tree], tree: Tree) -> Summary:
            summary: Summary = self.run(name, self.question.sweep_keys(grids), tree)
            return summary

        search = FleetSearch(base, rate, best, curve, routers, sweep)
        return search.smallest() if fixed is None else search.fleet(fixed)


def recommend(question: Question, folder: Path, executor: Executor, progress: Progress) -> Answer:
    """Run the sweeps in a folder and return the answer."""
    search = Search(question, folder, executor, progress)
    if "speculative" in question.keys:  # the base has no drafts, so that it does not show whether the engine has them
        scenario_from(apply_assignment(question.base, {TOKENS: COUNTS[0]}), "--speculative")
    summary: Summary = search.run("sweep", question.sweep_keys(question.grids))
    rate, best, more = summary.experiment.own_rate(0), first_choice(summary), None
    best_load = defaults_load = None
    if question.constraints:
        tried = [best] if best.eligible else [*summary.rows[:CANDIDATES], summary.baseline]
        loads = search.capacities("capacity", tried, rate)
        if not best.eligible:
            best = next((row for row in tried if row.assignment == loads.curves[0].assignment), summary.baseline)
        more = search.holds_more(summary, best, curve_of(loads, best)) if best.eligible else None
        if more is not None:
            best, loads = more, search.capacities("capacity-more", [more], rate)
        best_load, defaults_load = curve_of(loads, best), loads.baseline
    fleet = search.fleet(best, best_load, rate)
    chosen_tree = apply_assignment(question.base, best.assignment)
    write_yaml(folder / "best.yaml", chosen_tree if fleet is None else fleet.scenario)
    capacity = None if best_load is None else best_load.capacity
    limit_rate = rate if capacity is None or capacity.missed_at is None else capacity.missed_at
    chosen = search.scenario(best)
    limit, profile = limit_of(simulate_at(chosen, limit_rate)), load_profile(question.base["profile"])
    return Answer(
        question, rate, best, summary.baseline, best_load, defaults_load, more is not None, chosen, profile, limit,
        limit_rate, fleet, search.drafts(summary, best, rate),
    )  # fmt: skip


def first_choice(summary: Summary) -> Row:
    """Return the winner; if it has drafts that gain nothing, the winner of those that are not about drafts."""
    best = summary.rows[0]
    undrafted = [row for row in summary.rows if not row.assignment.get(TOKENS)]
    tied = best in undrafted or any(row.eligible and summary.relate(row, best, 0).tied for row in undrafted)
    if TOKENS not in best.assignment or not tied:
        return best
    plain = {row.config: row for row in undrafted if TOKENS not in row.assignment}
    runs = {(row.config, run["replication"]): run for row in plain.values() for run in row.runs}
    other = Summary(summary.experiment, runs).rows[0]
    return plain[other.config] if other.eligible else best


def as_grid(row: Row) -> dict[str, list[Any]]:
    """Return the settings of a row as a grid of one point."""
    return {key: [value] for key, value in row.assignment.items()}


def curve_of(loads: RateSummary, row: Row) -> Curve:
    """Return the curve of the settings of a row; the defaults need not have any."""
    return next((curve for curve in loads.curves if curve.assignment == row.assignment), loads.baseline)


def simulate_at(scenario: Scenario, rate: float) -> SimulatedRun:
    """Run a scenario at a request rate."""
    return simulate(scenario, set_rate(load_trace(scenario), rate))
