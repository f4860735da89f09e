"""The Python API: run, sweep, replay and load. Results hold pandas frames (see frames.py).

    import servesim
    stock = servesim.run(preset="contest-baseline", workload={"contest": {"X": 0.5, "T": 3000}})
    stock.requests.ttft.describe()
    result = servesim.sweep("examples/contest_knobs.yaml")
    result.table.head()

Wrong input raises servesim.core.BadInput: one line with the key and the expected value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

import pandas as pd
from pydantic import PrivateAttr
from servesim.config.overrides import Tree, merge, read_scenario_file, set_key, with_preset
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import allow_code
from servesim.core import BadInput, Policy
from servesim.core import field_values as fields_of
from servesim.core.limits import DEFAULT_DRAWS, MAX_DRAWS
from servesim.costs.device_profile import bundled_profiles, load_profile
from servesim.files.scratch import ScratchFolder
from servesim.runs.intervals import simulate_draws
from servesim.runs.run_folder import read_run
from servesim.runs.simulate import load_trace as load_requests
from servesim.study import executor as executors
from servesim.study.experiment import Experiment, SweepFile, build_experiment, load_base, read_experiment, validate_file
from servesim.study.files import write_summary
from servesim.study.progress import Progress
from servesim.study.ranking import Summary
from servesim.study.sweep import load_summary as load_sweep
from servesim.study.sweep import sweep as run_all
from servesim.traces.trace import Columns, Trace, build_trace

from .frames import ReplayResult, SweepResult, replay_of
from .profile_frames import ProfileFrames
from .run_frames import Result, result_of_data, run_scenario

Source = Union[str, Path, Mapping[str, Any], None]
Loaded = Union[Result, SweepResult, ReplayResult, "dict[str, ReplayResult]", ProfileFrames, pd.DataFrame]


class ScenarioWithPolicy(Scenario):
    """A scenario with a policy object instead of a policy name."""

    _policy: Policy = PrivateAttr()

    def make_policy(self) -> Policy:
        return self._policy


class RepeatedScenario(ScenarioWithPolicy):
    """A scenario with a policy object that runs several times: each run has a new copy."""

    def make_policy(self) -> Policy:
        return replace(self._policy)


def run(
    scenario: Source = None,
    *,
    preset: Optional[str] = None,
    policy: Union[str, Mapping[str, Any], Policy, None] = None,
    trace: Union[str, Path, Mapping[str, Any], pd.DataFrame, None] = None,
    workload: Optional[Mapping[str, Any]] = None,
    engine: Optional[Mapping[str, Any]] = None,
    profile: Union[str, Path, Mapping[str, Any], None] = None,
    slo: Optional[Mapping[str, float]] = None,
    seed: Optional[int] = None,
    settings: Optional[Mapping[str, Any]] = None,
    decisions: bool = False,
    turns: bool = False,
    trust: bool = False,
    intervals: Union[bool, int] = False,
) -> Result:
    """Simulate one scenario.

    `scenario` is a YAML file, a mapping of its keys, or None. Keys are merged in this order: preset, scenario, other
    arguments, `settings` (`{"policy.delay_factor": 0.5}`). `policy` may be a Policy object, `trace` a frame with the
    columns arrival, prompt and output. `decisions=True` keeps one row per scheduler step (`turns` is its old name). If
    the engine gets stuck, `metrics["stuck"]` says why. A policy named FILE.py:NAME is executed if the file is in the
    working folder; `trust=True` allows files of all folders. A Policy object needs no permission. `intervals=True` runs
    it with 24 random cost models too (or another number), and `metrics["intervals"]` has the limits of every metric.
    """
    draws = check_draws(intervals)
    policy_object = policy if isinstance(policy, Policy) else None
    requests = requests_in(trace) if isinstance(trace, pd.DataFrame) else None
    arguments = {
        "policy": None if policy_object is not None else {"name": policy} if isinstance(policy, str) else policy,
        "trace": None if requests is not None else {"path": str(trace)} if isinstance(trace, (str, Path)) else trace,
        "workload": workload, "engine": engine, "slo": slo, "seed": seed,
        "profile": str(profile) if isinstance(profile, Path) else profile,
    }  # fmt: skip
    overrides = {key: value for key, value in arguments.items() if value is not None}
    with allow_code(trust):
        checked_scenario = scenario_from(merge_scenario(scenario, preset, overrides, settings))
        repeated = checked_scenario
        if policy_object is not None:
            repeated = with_policy_object(checked_scenario, policy_object, RepeatedScenario)
            checked_scenario = with_policy_object(checked_scenario, policy_object)
        if not draws:
            return run_scenario(checked_scenario, requests, decisions or turns)
        requests = load_requests(checked_scenario) if requests is None else requests
        results = simulate_draws(repeated, load_profile(repeated.profile), draws, requests)
        return run_scenario(checked_scenario, requests, decisions or turns, results)


def check_draws(intervals: Union[bool, int]) -> int:
    """Return the number of random cost models, 0 without intervals."""
    draws = DEFAULT_DRAWS if intervals is True else int(intervals)
    if draws and not 2 <= draws <= MAX_DRAWS:
        raise BadInput(f"intervals: expected true or a number of draws from 2 to {MAX_DRAWS}, got {intervals}")
    return draws


def merge_scenario(
    source: Source, preset: Optional[str], overrides: Tree, settings: Optional[Mapping[str, Any]] = None
) -> Tree:
    """Return the scenario tree of a preset, a file or mapping, arguments and settings; later ones win."""
    tree = read_scenario_file(source) if isinstance(source, (str, Path)) else with_preset(dict(source or {}))
    if preset is not None:
        tree = merge(with_preset({"preset": preset}), tree)
    tree = merge(tree, overrides)
    for key, value in (settings or {}).items():
        tree = set_key(tree, key, value)
    return tree


def with_policy_object(
    scenario: Scenario, policy: Policy, kind: type[ScenarioWithPolicy] = ScenarioWithPolicy
) -> Scenario:
    """Return the scenario with a policy object."""
    tree = scenario.model_dump() | {"policy": {"name": type(policy).__name__, **fields_of(policy)}}
    result = kind.model_validate(tree)
    result._policy = policy
    return result


def requests_in(frame: pd.DataFrame) -> Trace:
    """Return the requests of a frame. Columns are request fields, the index holds the request ids."""
    known = ("arrival", "prompt", "output", "limit", "priority", "session", "after", "delay")
    for name in ("arrival", "prompt", "output"):
        if name not in frame:
            raise BadInput(f"trace: expected a column {name}, got {', '.join(map(str, frame.columns))}")
        column = frame[name]
        if not pd.api.types.is_numeric_dtype(column) or column.isna().any() or (column < 0).any():
            raise BadInput(f"trace: column {name}: expected numbers of at least 0 in every row")
    lists: dict[str, Any] = {
        name: [None if pd.isna(v) else v for v in frame[name].tolist()] for name in known if name in frame
    }
    return build_trace(Columns(**lists, id=frame.index.tolist()), "frame", "frame")


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
) -> SweepResult:
    """Run every configuration of an experiment on the same random numbers.

    `experiment` is a sweep file, a mapping of its keys, or None. `keys` replace keys of it (base, params, replications,
    objectives, ...). `output` keeps the folder of the sweep, and `resume` continues it. `jobs` is the number of
    processes, None for one per core. A script with more than one process needs `if __name__ == "__main__"`. `trust` is
    that of `run`.
    """
    with allow_code(trust), ScratchFolder() as scratch:
        planned = experiment_from(experiment, keys)
        folder = Path(scratch) / "sweep" if output is None else Path(output)
        workers = executors.make_executor(executor, executors.process_count(jobs))
        with executors.close_on_exit(workers) as pool, Progress("sweep", not progress) as bar:
            summary = Summary(planned, run_all(planned, folder, pool, resume, progress=bar))
        if output is not None:
            write_summary(summary, folder)
    return SweepResult(summary)


def experiment_from(source: Source, keys: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a file or a mapping, with some keys replaced."""
    if isinstance(source, (str, Path)):
        return read_experiment(source, **keys)
    file = validate_file(SweepFile, {**(source or {}), **keys}, "sweep", {})
    return build_experiment(file, load_base(file.base, Path("sweep")), file.name or "sweep")


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
    from servesim.calibrate.probe.host_overhead import HostOverhead
    from servesim.calibrate.replay.replay import check_profile, replay_on_backend, replay_requests, simulate_and_compare

    overrides = {} if profile is None else {"profile": str(profile) if isinstance(profile, Path) else profile}
    with allow_code(trust):
        target = scenario_from(merge_scenario(scenario, preset, overrides, settings))
        known = load_profile(target.profile)
        with DeviceSession(backend, model or name_of(known.about.get("model")), worker_python) as session:
            session.load([target])
            check_profile(known, session)
            requests = replay_requests(target, limit=limit)
            paced = known if device is None else load_profile(device)
            done = replay_on_backend(session, target.name or target.policy["name"], target, requests, paced, warm_up)
            if device is not None:
                simulate_and_compare(done, requests, known, HostOverhead())
    return replay_of(done)


def load(path: Union[str, Path]) -> Loaded:
    """Read a folder of a sweep, a run, a replay or a profile, or a trace file.

    Several replays are returned by name. A bundled profile may be given by its name.
    """
    path = Path(path)
    if (path / "profile.yaml").is_file() or (not path.exists() and str(path) in bundled_profiles()):
        return ProfileFrames(load_profile(str(path)))
    if (path / "experiment.json").is_file():
        return SweepResult(load_sweep(path))
    if (path / "live").is_dir() and (path / "sim").is_dir():
        return load_replay(path)
    if path.is_dir():
        return result_of_data(read_run(path))
    return load_trace(path)


def load_trace(path: Path) -> pd.DataFrame:
    """Return a trace file as a frame, indexed by request id."""
    from servesim.traces.read.load import load as read

    names = ("id", "arrival", "prompt", "output", "limit", "priority", "session")
    rows = [[getattr(request, name) for name in names] for request in read(path).requests]
    return pd.DataFrame(rows, columns=list(names)).set_index("id")


def load_replay(folder: Path) -> Union[ReplayResult, dict[str, ReplayResult]]:
    """Return the replay of a folder of `sim replay -o`; several replays are returned by name."""
    from servesim.calibrate.replay.verify import pair_folders

    pairs, _ = pair_folders(folder / "sim", folder / "live")
    replays = {name: load_one_replay(name or folder.name, *both) for name, *both in pairs}
    return replays.pop("") if "" in replays else replays


def load_one_replay(name: str, simulated: Path, measured: Path) -> ReplayResult:
    """Return one replay from its two folders."""
    from servesim.calibrate.probe.host_overhead import CostWithHost, HostOverhead
    from servesim.calibrate.replay.resimulate import compare_runs

    simulated_run, measured_run = read_run(simulated), read_run(measured)
    assert simulated_run.scenario is not None
    profile = load_profile(simulated_run.scenario.profile)
    host = HostOverhead(*measured_run.result.get("host", (0.0, 0.0)))
    if host != HostOverhead() and measured_run.result.get("backend", {}).get("backend") != "fake":
        profile = replace(profile, cost=CostWithHost(profile.cost, host))
    profile = profile.with_sampling(simulated_run.scenario.engine.sampling)
    both = compare_runs(name, simulated_run, measured_run)
    return ReplayResult(
        name, result_of_data(simulated_run), result_of_data(measured_run), both, profile, measured_run.calls
    )
