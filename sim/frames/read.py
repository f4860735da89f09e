"""Read the folders of sweeps, runs, replays and profiles, and trace files, as results of the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Union

import pandas as pd
from servesim.costs.device_profile import bundled_profiles, load_profile
from servesim.runs.run_folder import read_run
from servesim.study.result import load_result

from .profile import ProfileFrames
from .replay import ReplayResult
from .run import Result, result_of_data
from .sweep import Swept, frames_of

Loaded = Union[Result, Swept, ReplayResult, "dict[str, ReplayResult]", ProfileFrames, pd.DataFrame]


def load(path: Union[str, Path]) -> Loaded:
    """Read a folder of a sweep, a run, a replay or a profile, or a trace file.

    Several replays are returned by name. A bundled profile may be given by its name.
    """
    path = Path(path)
    if (path / "profile.yaml").is_file() or (not path.exists() and str(path) in bundled_profiles()):
        return ProfileFrames(load_profile(str(path)))
    if (path / "experiment.json").is_file():
        return frames_of(load_result(path))
    if (path / "live").is_dir() and (path / "sim").is_dir():
        return load_replay(path)
    if path.is_dir():
        return result_of_data(read_run(path))
    return load_trace(path)


def load_trace(path: Path) -> pd.DataFrame:
    """Return a trace file as a frame, indexed by request id."""
    from servesim.traces.read.formats import load as read
    from servesim.traces.trace import has_field

    requests = read(path).requests
    names = ["id", "arrival", "prompt", "output", "limit", "priority", "session"]
    names += [name for name in ("content", "sampling") if has_field(requests, name)]
    rows = [[getattr(request, name) for name in names] for request in requests]
    return pd.DataFrame(rows, columns=names).set_index("id")


def load_replay(folder: Path) -> Union[ReplayResult, dict[str, ReplayResult]]:
    """Return the replay of a folder of `sim replay -o`; several replays are returned by name."""
    from servesim.calibrate.replay.verify import pair_folders

    pairs, _ = pair_folders(folder / "sim", folder / "live")
    replays = {name: load_one_replay(name or folder.name, *both) for name, *both in pairs}
    return replays.pop("") if "" in replays else replays


def load_one_replay(name: str, simulated: Path, measured: Path) -> ReplayResult:
    """Return one replay from its two folders."""
    from servesim.calibrate.probe.host_overhead import measured_host
    from servesim.calibrate.replay.resimulate import compare_runs

    simulated_run, measured_run = read_run(simulated), read_run(measured)
    assert simulated_run.scenario is not None
    profile = load_profile(simulated_run.scenario.profile)
    profile = profile.for_run(simulated_run.scenario.engine.sampling, measured_host(measured_run.result))
    both = compare_runs(name, simulated_run, measured_run)
    return ReplayResult(
        name, result_of_data(simulated_run), result_of_data(measured_run), both, profile, measured_run.calls
    )
