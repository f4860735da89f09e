"""The Python API: run, sweep, replay and load; what they return holds pandas frames (see frames.py).

    import servesim
    stock = servesim.run(preset="contest-baseline", workload={"contest": {"X": 0.5, "T": 3000}})
    stock.requests.ttft.describe()
    found = servesim.sweep("examples/contest_knobs.yaml")
    found.table.head()

What is given wrongly raises servesim.core.BadInput, one line that names the key and what was expected.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

import pandas as pd
from pydantic import PrivateAttr
from servesim.config.overrides import Tree, merge, put, read_tree, with_preset
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Policy
from servesim.core import settings as fields_of
from servesim.costs.device_profile import bundled, load_profile
from servesim.runs.run_folder import read_run
from servesim.study import executor as executors
from servesim.study.experiment import Experiment, SweepFile, base_of, checked, experiment_of, read_experiment
from servesim.study.files import write_summary
from servesim.study.progress import Progress
from servesim.study.ranking import Summary
from servesim.study.sweep import load as load_sweep
from servesim.study.sweep import sweep as run_all
from servesim.traces.trace import Columns, Trace, assemble

from .frames import Replay, Result, Sweep, replay_of, result_of_data, run_scenario
from .profile_frames import Calibration

Source = Union[str, Path, Mapping[str, Any], None]
Loaded = Union[Result, Sweep, Replay, "dict[str, Replay]", Calibration, pd.DataFrame]


class Own(Scenario):
    """A scenario whose policy is an object and needs no name."""

    _policy: Policy = PrivateAttr()

    def make_policy(self) -> Policy:
        return self._policy


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
    turns: bool = False,
) -> Result:
    """Simulate one scenario.

    `scenario` is a YAML file or a mapping of its keys, or nothing; a preset is laid under it, the other arguments
    over it, `settings` last (`{"policy.delay_factor": 0.5}`). `policy` may be an object, `trace` a frame with
    arrival, prompt and output. `turns` keeps a row for every turn of the scheduler. An engine that livelocks is told
    of in `figures["stuck"]`.
    """
    own = policy if isinstance(policy, Policy) else None
    requests = requests_in(trace) if isinstance(trace, pd.DataFrame) else None
    given = {
        "policy": None if own is not None else {"name": policy} if isinstance(policy, str) else policy,
        "trace": None if requests is not None else {"path": str(trace)} if isinstance(trace, (str, Path)) else trace,
        "workload": workload, "engine": engine, "slo": slo, "seed": seed,
        "profile": str(profile) if isinstance(profile, Path) else profile,
    }  # fmt: skip
    tree = tree_of(scenario, preset, {key: value for key, value in given.items() if value is not None}, settings)
    found = scenario_from(tree)
    return run_scenario(found if own is None else with_own(found, own), requests, turns)


def tree_of(source: Source, preset: Optional[str], over: Tree, settings: Optional[Mapping[str, Any]] = None) -> Tree:
    """Return the scenario that file, preset, arguments and settings give together."""
    tree = read_tree(source) if isinstance(source, (str, Path)) else with_preset(dict(source or {}))
    if preset is not None:
        tree = merge(with_preset({"preset": preset}), tree)
    tree = merge(tree, over)
    for key, value in (settings or {}).items():
        tree = put(tree, key.split("."), value)
    return tree


def with_own(scenario: Scenario, policy: Policy) -> Scenario:
    """Return the scenario under a policy that is no entry of any table."""
    tree = scenario.model_dump() | {"policy": {"name": type(policy).__name__, **fields_of(policy)}}
    found = Own.model_validate(tree)
    found._policy = policy
    return found


def requests_in(frame: pd.DataFrame) -> Trace:
    """Return the requests of a frame; any field of a request may be a column, the index is their ids."""
    known = ("arrival", "prompt", "output", "limit", "priority", "session", "after", "delay")
    for name in ("arrival", "prompt", "output"):
        if name not in frame:
            raise BadInput(f"trace: expected a column {name}, got {', '.join(map(str, frame.columns))}")
        column = frame[name]
        if not pd.api.types.is_numeric_dtype(column) or column.isna().any() or (column < 0).any():
            raise BadInput(f"trace: column {name}: expected numbers of at least 0 and no gaps")
    lists: dict[str, Any] = {
        name: [None if pd.isna(v) else v for v in frame[name].tolist()] for name in known if name in frame
    }
    return assemble(Columns(**lists, id=frame.index.tolist()), "frame", "frame")


def sweep(
    experiment: Source = None,
    output: Union[str, Path, None] = None,
    *,
    jobs: Optional[int] = 1,
    executor: str = "local",
    resume: bool = False,
    progress: bool = False,
    **keys: Any,
) -> Sweep:
    """Run every configuration of an experiment on the same random numbers.

    `experiment` is a sweep file, a mapping of its keys, or nothing; `keys` replace keys of it (base, params,
    replications, objectives, ...). With `output` the experiment's folder is kept and `resume` continues it. `jobs` is
    how many processes run, None for one a core; a script that asks for more than one needs the usual
    `if __name__ == "__main__"`.
    """
    planned = experiment_from(experiment, keys)
    with tempfile.TemporaryDirectory(prefix="servesim-") as scratch:
        folder = Path(scratch) / "sweep" if output is None else Path(output)
        workers = executors.executor(executor, executors.core_count(jobs))
        with executors.executing(workers) as where, Progress("sweep", not progress) as bar:
            summary = Summary(planned, run_all(planned, folder, where, resume, progress=bar))
        if output is not None:
            write_summary(summary, folder)
    return Sweep(summary)


def experiment_from(source: Source, keys: Mapping[str, Any]) -> Experiment:
    """Return the experiment that a file or a mapping and further keys give."""
    if isinstance(source, (str, Path)):
        return read_experiment(source, **keys)
    file = checked(SweepFile, {**(source or {}), **keys}, "sweep", {})
    return experiment_of(file, base_of(file.base, Path("sweep")), file.name or "sweep")


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
) -> Replay:
    """Run one scenario on a live backend (kbk, torch or fake), simulate it, and return both.

    `profile` is what the simulation takes steps to cost. A fake backend takes the time that `device` says, another
    profile; so one can see what a profile that is off does to the figures.
    """
    from servesim.calibrate.live.setup import Stage, name_of
    from servesim.calibrate.probe.host_overhead import Host
    from servesim.calibrate.replay.replay import check_profile, compare_with, replay_on, requests_of

    over = {} if profile is None else {"profile": str(profile) if isinstance(profile, Path) else profile}
    found = scenario_from(tree_of(scenario, preset, over, settings))
    known = load_profile(found.profile)
    with Stage(backend, model or name_of(known.about.get("model")), worker_python) as stage:
        stage.load([found])
        check_profile(known, stage)
        requests = requests_of(found, limit=limit)
        paced = known if device is None else load_profile(device)
        done = replay_on(stage, found.name or found.policy["name"], found, requests, paced, warm_up)
        if device is not None:
            compare_with(done, requests, known, Host())
    return replay_of(done)


def load(path: Union[str, Path]) -> Loaded:
    """Read what is at a path: the folder of a sweep, of a run, of a replay (several: by name), a profile, or a trace.

    A bundled profile is also known by its name alone.
    """
    path = Path(path)
    if (path / "profile.yaml").is_file() or (not path.exists() and str(path) in bundled()):
        return Calibration(load_profile(str(path)))
    if (path / "experiment.json").is_file():
        return Sweep(load_sweep(path))
    if (path / "live").is_dir() and (path / "sim").is_dir():
        return load_replay(path)
    if path.is_dir():
        return result_of_data(read_run(path))
    return load_trace(path)


def load_trace(path: Path) -> pd.DataFrame:
    """Return a trace of any known format as a frame, indexed by request id."""
    from servesim.traces.read.load import load as read

    names = ("id", "arrival", "prompt", "output", "limit", "priority", "session")
    rows = [[getattr(request, name) for name in names] for request in read(path).requests]
    return pd.DataFrame(rows, columns=list(names)).set_index("id")


def load_replay(folder: Path) -> Union[Replay, dict[str, Replay]]:
    """Return the replay of a folder that `sim replay -o` wrote, or all of them by name."""
    from servesim.calibrate.replay.verify import pair_folders

    pairs, _ = pair_folders(folder / "sim", folder / "live")
    found = {name: replay_in(name or folder.name, *both) for name, *both in pairs}
    return found.pop("") if "" in found else found


def replay_in(name: str, simulated: Path, measured: Path) -> Replay:
    """Return one replay from its two folders."""
    from servesim.calibrate.probe.host_overhead import Host, Hosted
    from servesim.calibrate.replay.resimulate import compare_runs

    ours, theirs = read_run(simulated), read_run(measured)
    assert ours.scenario is not None
    profile = load_profile(ours.scenario.profile)
    host = Host(*theirs.result.get("host", (0.0, 0.0)))
    if host != Host() and theirs.result.get("backend", {}).get("backend") != "fake":
        profile = replace(profile, cost=Hosted(profile.cost, host))
    both = compare_runs(name, ours, theirs)
    return Replay(name, result_of_data(ours), result_of_data(theirs), both, profile, theirs.calls)
