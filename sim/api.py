"""The Python API: run, sweep, search, compare, check, capacity, replay, load and explore. Results hold pandas frames.

    import servesim
    stock = servesim.run(preset="contest-baseline", workload={"contest": {"X": 0.5, "T": 3000}})
    stock.requests.ttft.describe()
    result = servesim.sweep("examples/contest_knobs.yaml")
    result.table.head()

Wrong input raises servesim.core.BadInput: one line with the key and the expected value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

import pandas as pd
from servesim.config.first_scenario import flow
from servesim.config.scenario import scenario_from
from servesim.config.user_code import allow_code
from servesim.core import Policy
from servesim.core.limits import check_fraction, check_replications
from servesim.costs.device_profile import load_profile
from servesim.files.scratch import ScratchFolder
from servesim.runs.intervals import simulate_draws
from servesim.runs.simulate import load_trace as load_requests
from servesim.study.check import Check, run_check
from servesim.study.compared_runs import from_scenario
from servesim.study.executor import Executor, open_executor
from servesim.study.experiment_file import name_of_file, valid_name
from servesim.study.optuna_search import read_search
from servesim.study.optuna_search import search as run_search
from servesim.study.progress import Progress
from servesim.study.rate_summary import Result as Summarised
from servesim.study.result import run_experiment
from servesim.study.study_keys import CAPACITY_PRECISION
from servesim.study.sweep_file import Source, capacity_experiment, read_experiment
from servesim.study.table import write_summary

from .frames.compare import CompareResult, compare_runs
from .frames.inputs import (
    RepeatedScenario,
    check_draws,
    compared_runs,
    merge_scenario,
    requests_in,
    scenario_keys,
    with_policy_object,
)
from .frames.read import load
from .frames.replay import ReplayResult, replay_of
from .frames.run import Result, run_scenario
from .frames.sweep import RateSweepResult, SweepResult, Swept, frames_of

if TYPE_CHECKING:
    from .explorer.notebook import Explorer

__all__ = ["capacity", "check", "compare", "explore", "load", "replay", "run", "search", "sweep"]


def run(
    scenario: Source = None,
    *,
    preset: Optional[str] = None,
    policy: Union[str, Mapping[str, Any], Policy, None] = None,
    trace: Union[str, Path, Mapping[str, Any], pd.DataFrame, None] = None,
    workload: Optional[Mapping[str, Any]] = None,
    engine: Optional[Mapping[str, Any]] = None,
    profile: Union[str, Path, Mapping[str, Any], None] = None,
    cluster: Optional[Mapping[str, Any]] = None,
    speculative: Optional[Mapping[str, Any]] = None,
    slo: Optional[Mapping[str, float]] = None,
    seed: Optional[int] = None,
    settings: Optional[Mapping[str, Any]] = None,
    decisions: bool = False,
    trust: bool = False,
    intervals: Union[bool, int] = False,
) -> Result:
    """Simulate one scenario.

    `scenario` is a YAML file, a mapping of its keys, or None. Keys are merged in this order: preset, scenario, other
    arguments, `settings` (`{"policy.delay_factor": 0.5}`). `policy` may be a Policy object, `trace` a frame with the
    columns arrival, prompt and output. `decisions=True` keeps one row per scheduler step. If
    the engine gets stuck, `metrics["stuck"]` says why. A policy named FILE.py:NAME is executed if the file is in the
    working folder; `trust=True` allows files of all folders. A Policy object needs no permission. `intervals=True` runs
    it with 24 random cost models too (or another number), and `metrics["intervals"]` has the limits of every metric.
    """
    draws = check_draws(intervals)
    policy_object = policy if isinstance(policy, Policy) else None
    requests = requests_in(trace) if isinstance(trace, pd.DataFrame) else None
    overrides = scenario_keys({
        "policy": policy if policy_object is None else None, "trace": trace if requests is None else None,
        "workload": workload, "engine": engine, "profile": profile, "cluster": cluster,
        "speculative": speculative, "slo": slo, "seed": seed,
    })  # fmt: skip
    with allow_code(trust):
        checked_scenario = scenario_from(merge_scenario(scenario, preset, overrides, settings))
        repeated = checked_scenario
        if policy_object is not None:
            repeated = with_policy_object(checked_scenario, policy_object, RepeatedScenario)
            checked_scenario = with_policy_object(checked_scenario, policy_object)
        if not draws:
            return run_scenario(checked_scenario, requests, decisions)
        requests = load_requests(checked_scenario) if requests is None else requests
        results = simulate_draws(repeated, load_profile(repeated.profile), draws, requests)
        return run_scenario(checked_scenario, requests, decisions, results, repeated)


def sweep(
    experiment: Source = None,
    output: Union[str, Path, None] = None,
    *,
    jobs: Optional[int] = 1,
    executor: str = "local",
    resume: bool = False,
    progress: bool = False,
    trust: bool = False,
    **keys: Any,
) -> Swept:
    """Run every configuration of an experiment on the same random numbers.

    `experiment` is a sweep file, a mapping of its keys, or None. `keys` replace keys of it (base, params, replications,
    objectives, ...). `output` keeps the folder of the sweep, and `resume` continues it. `jobs` is the number of
    processes, None for one per core. A script with more than one process needs `if __name__ == "__main__"`. `trust` is
    that of `run`. With the key `rates`, the result has one SweepResult per request rate, and curves over the rate.
    """
    with allow_code(trust):
        run_missing = partial(run_experiment, read_experiment(experiment, **keys))
        return run_study(run_missing, output, executor, jobs, resume, Progress("sweep", not progress))


def search(
    experiment: Source = None,
    output: Union[str, Path, None] = None,
    *,
    jobs: Optional[int] = 1,
    executor: str = "local",
    resume: bool = False,
    progress: bool = False,
    trust: bool = False,
    **keys: Any,
) -> SweepResult:
    """Search the parameter space with Optuna, as `sim search`. The result has the form of a sweep.

    `experiment` is a search file, a mapping of its keys, or None. `keys` replace keys of it (base, params, trials,
    sampler, objectives, subject_to, ...). The other arguments are those of `sweep`.
    """
    with allow_code(trust):
        run_missing = partial(run_search, read_search(experiment, **keys))
        bar = Progress("search", not progress, unit="trial")
        result = run_study(run_missing, output, executor, jobs, resume, bar)
    assert isinstance(result, SweepResult)
    return result


def capacity(
    scenario: Source = None,
    output: Union[str, Path, None] = None,
    *,
    subject_to: Union[str, Sequence[str]],
    preset: Optional[str] = None,
    settings: Optional[Mapping[str, Any]] = None,
    rates: Union[str, Sequence[float]] = "auto",
    precision: float = CAPACITY_PRECISION,
    replications: int = 1,
    steady: bool = False,
    jobs: Optional[int] = 1,
    executor: str = "local",
    resume: bool = False,
    progress: bool = False,
    trust: bool = False,
    **keys: Any,
) -> RateSweepResult:
    """Find the highest request rate at which a scenario meets all constraints, as `sim capacity`.

    `subject_to` is a constraint such as "p99_ttft_ms <= 500", or a list of them. `scenario`, `preset` and `settings`
    are those of `run`; `keys` are other keys of the scenario (policy, trace, workload, engine, profile, slo, seed).
    The search begins at `rates` and ends at the relative `precision`. `steady=True` leaves out warm-up and drain. The
    result is that of a sweep over rates: `rate` is the highest rate, `scenario()` the scenario at this rate. Every rate
    has the same requests; only their arrival times are scaled. A short workload is made longer, because a backlog that
    grows stays small in a short run. The other arguments are those of `sweep`.
    """
    terms = {
        "subject_to": subject_to, "rates": rates, "precision": precision, "replications": replications,
        "steady": steady,
    }  # fmt: skip
    with allow_code(trust):
        tree = merge_scenario(scenario, preset, scenario_keys(keys), settings)
        given = scenario_from(tree).name or "scenario"
        name = name_of_file(Path(scenario)) if isinstance(scenario, (str, Path)) else valid_name(given)
        run_missing = partial(run_experiment, capacity_experiment(tree, name, terms))
        result = run_study(run_missing, output, executor, jobs, resume, Progress("capacity", not progress))
    assert isinstance(result, RateSweepResult)
    return result


def run_study(
    run_missing: Callable[[Path, Executor, bool, Progress], Summarised],
    output: Union[str, Path, None], executor: str, jobs: Optional[int], resume: bool, bar: Progress,
) -> Swept:  # fmt: skip
    """Run a sweep or a search in its folder, or in a temporary one that no one reads."""
    with ScratchFolder() as scratch:
        folder = Path(scratch) / "study" if output is None else Path(output)
        with open_executor(executor, jobs) as pool, bar:
            summary = run_missing(folder, pool, resume, bar)
        if output is not None:
            write_summary(summary, folder)
    return frames_of(summary)


def compare(
    a: Union[Source, Result, SweepResult],
    b: Union[Source, Result, SweepResult],
    *,
    metrics: Union[str, Sequence[str], None] = None,
    replications: int = 10,
    confidence: float = 0.95,
    intervals: Union[bool, int] = False,
    settings: Optional[Mapping[str, Any]] = None,
    jobs: Optional[int] = 1,
    executor: str = "local",
    trust: bool = False,
) -> CompareResult:
    """Compare B with A by paired differences, as `sim compare`.

    A and B are scenario files, mappings of scenario keys, folders (DIR, DIR:CONFIG, DIR:CONFIG@RATE), or results of
    `run` and `sweep` (its winner). Scenarios run on common random numbers; `replications`, `intervals` and `settings`
    apply to them only. Single runs are paired by batches of requests. `metrics` defaults to those of the command.
    """
    check_replications(replications, "replications")
    check_fraction(confidence, "confidence")
    draws = check_draws(intervals)
    with allow_code(trust), open_executor(executor, jobs) as pool:
        simulate = partial(from_scenario, replications=replications, executor=pool, draws=draws)
        first, second = (compared_runs(side, name, settings, simulate) for side, name in ((a, "a"), (b, "b")))
    return compare_runs(first, second, metrics, confidence)


def check(
    scenario: Source = None,
    *,
    subject_to: Union[str, Sequence[str]],
    baseline: Source = None,
    preset: Optional[str] = None,
    settings: Optional[Mapping[str, Any]] = None,
    replications: int = 10,
    intervals: Union[bool, int] = True,
    confidence: float = 0.95,
    jobs: Optional[int] = 1,
    executor: str = "local",
    trust: bool = False,
    **keys: Any,
) -> Check:
    """Check that a scenario meets constraints, as `sim check`: `verdict` is met, undecided or broken.

    `subject_to` is a constraint such as "p99_ttft_ms <= 500", or a list of them. With a `baseline` (a file or a mapping
    of scenario keys), it may be "p99_ttft_ms <= 1.05 * baseline". `preset`, `settings` and `keys` are those of
    `capacity`, and apply to the baseline too. `rows` has the verdict of every constraint.
    """
    check_replications(replications, "replications")
    check_fraction(confidence, "confidence")
    draws = check_draws(intervals)

    def side(source: Source, role: str) -> tuple[dict[str, Any], str]:
        tree = merge_scenario(source, preset, scenario_keys(keys), settings)
        return tree, str(source) if isinstance(source, (str, Path)) else scenario_from(tree, role).name or role

    with allow_code(trust), open_executor(executor, jobs, replications + draws) as pool:
        other = None if baseline is None else side(baseline, "baseline")
        return run_check(side(scenario, "scenario"), other, subject_to, pool, replications, draws, confidence)


def explore(
    scenario: Union[str, Path, None] = None,
    *,
    preset: Optional[str] = None,
    settings: Optional[Mapping[str, Any]] = None,
    height: int = 900,
    jobs: Optional[int] = None,
    trust: bool = False,
) -> Explorer:
    """Show the page of `sim explore` in a notebook: the settings of a scenario file as controls, its result as charts.

    The page is served on 127.0.0.1 until `stop()` of the result, or until Python ends. `height` is in pixels. `jobs` is
    the number of worker processes, None for one per core. `settings` are the first values of controls. `trust` is that
    of `run`.
    """
    from .explorer.notebook import Explorer
    from .explorer.server import open_page

    texts = {key: flow(value) for key, value in (settings or {}).items()}
    with allow_code(trust):
        server = open_page(None if scenario is None else str(scenario), preset, texts, jobs=jobs)
    return Explorer(server, height)


def replay(
    scenario: Source = None,
    *,
    backend: str,
    profile: Union[str, Path, Mapping[str, Any], None] = None,
    device: Union[str, Path, Mapping[str, Any], None] = None,
    model: Optional[str] = None,
    worker_python: Optional[str] = None,
    limit: Optional[int] = None,
    warm_up: int = 32,
    preset: Optional[str] = None,
    settings: Optional[Mapping[str, Any]] = None,
    trust: bool = False,
) -> ReplayResult:
    """Run one scenario on a live backend (kbk, torch or fake), simulate it, and return both.

    `profile` holds the step costs of the simulation. `device` is the profile that a fake backend runs with. Two
    different profiles show how errors of a profile change the metrics. `trust` is that of `run`.
    """
    from servesim.calibrate.live.setup import DeviceSession, name_of
    from servesim.calibrate.replay.replay import check_profile, replay_on_backend, replay_requests, simulate_and_compare

    with allow_code(trust):
        target = scenario_from(merge_scenario(scenario, preset, scenario_keys({"profile": profile}), settings))
        known = load_profile(target.profile)
        with DeviceSession(backend, model or name_of(known.about.get("model")), worker_python) as session:
            session.load([target])
            check_profile(known, session)
            requests = replay_requests(target, limit=limit)
            paced = known if device is None else load_profile(device)
            done = replay_on_backend(session, target.name or target.policy["name"], target, requests, paced, warm_up)
            if device is not None:
                simulate_and_compare(done, requests, known)
    return replay_of(done)
