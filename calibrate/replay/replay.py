"""`sim replay`: winners on the live engine, then simulated against measured.

The simulated side is the scenario as the device runs it: the same requests, policy and memory, no padding but the
device's own, and what the host adds to a step as seen in the warm-up.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from servesim.calibrate.live.setup import Stage, same_device
from servesim.calibrate.probe.host_overhead import Host, Hosted
from servesim.config.overrides import override, read_tree
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.runs.run_folder import DECISIONS, RunData, run_data, write_decisions, write_run
from servesim.runs.simulate import Run, fresh, load_trace
from servesim.study.experiment import read_experiment

from .live_run import LiveRun, live_run, write_live
from .resimulate import resimulate, simulated
from .verify import Comparison, compare


@dataclass
class Replayed:
    """A setting on the device, and simulated if there is a profile for it."""

    name: str
    live: LiveRun
    measured: RunData
    run: Optional[Run] = None
    simulated: Optional[RunData] = None
    comparison: Optional[Comparison] = None


def winners(path: Path, top: int, baseline: bool = False, settings: tuple[str, ...] = ()) -> list[tuple[str, Scenario]]:
    """Return the first `top` of a sweep with their names, and the baseline with them if asked for."""
    if path.is_file():  # a best.yaml by itself
        return [(path.stem, scenario_from(override(read_tree(path), settings), str(path)))]
    ranking = path / "summary.csv"
    if not ranking.is_file():
        raise BadInput(f"{path}: expected the folder of a finished `sim sweep`; it has no summary.csv")
    experiment = read_experiment(path)
    with ranking.open(encoding="utf-8", newline="") as lines:
        order = [int(row["config"]) for row in csv.DictReader(lines)]
    chosen = order[:top]
    if baseline and 0 not in chosen:
        chosen.append(0)
    found = []
    for config in chosen:
        name = f"rank{order.index(config) + 1}" + ("-baseline" if config == 0 else "")
        found.append((name, scenario_from(override(experiment.tree(config), settings), f"{path}: {config}")))
    return found


def requests_of(scenario: Scenario, time_scale: float = 1.0, limit: Optional[int] = None) -> list[Request]:
    """Return a scenario's requests from its first arrival on, times stretched, only so many of them."""
    requests = fresh(load_trace(scenario).requests)
    requests.sort(key=lambda request: request.arrival)
    requests = requests[:limit]
    if not requests:
        raise BadInput("trace: expected requests to replay, got none")
    if not 0 < time_scale < float("inf"):
        raise BadInput(f"--time-scale: expected a positive number, got {time_scale:g}")
    start = requests[0].arrival
    kept = {request.id for request in requests}
    for request in requests:
        request.arrival = request.since = (request.arrival - start) * time_scale
        request.delay *= time_scale
        if request.after not in kept:
            request.after = None
    return requests


def as_run(scenario: Scenario) -> Scenario:
    """Return a scenario as a backend runs it: nothing padded, nothing cold."""
    engine = scenario.engine.model_copy(update={"prefill_gears": [], "decode_gears": [1], "cold_start": None})
    return scenario.model_copy(update={"engine": engine})


def replay_on(
    stage: Stage,
    name: str,
    scenario: Scenario,
    requests: Sequence[Request],
    profile: Optional[Profile],
    warm_up: int = 0,
    quiet: bool = True,
) -> Replayed:
    """Replay one scenario on a loaded stage; with a profile, simulate and compare it too."""
    scenario = as_run(scenario)
    cost = None if profile is None else profile.cost
    line = ProgressLine(name, len(requests), quiet)
    told = stage.replay(scenario, fresh(requests), cost, warm_up, line)
    line.end()
    live = live_run(scenario, profile or Profile("none", LinearCost()), fresh(requests), told)
    replayed = Replayed(name, live, replace(run_data(live, live.decisions), name=name))
    if profile is not None and not live.stopped:
        compare_with(replayed, requests, profile, Host() if stage.backend == "fake" else Host(*told["host"]))
    return replayed


def compare_with(replayed: Replayed, requests: Sequence[Request], profile: Profile, host: Host) -> None:
    """Simulate what was replayed, compare, and say where the error comes from."""
    profile = replace(profile, cost=Hosted(profile.cost, host)) if host != Host() else profile
    scenario = replayed.live.scenario
    replayed.run, decisions = simulated(scenario, fresh(requests), profile, profile.cost)
    replayed.simulated = replace(run_data(replayed.run, decisions), name=replayed.name)
    again, followed = None, None
    if replayed.measured.calls:
        again, followed = resimulate(replayed.measured, profile)
    replayed.comparison = compare(replayed.simulated, replayed.measured, again, followed)


def write_replay(replayed: Replayed, folder: Path, single: bool) -> None:
    """Write a setting under live/ and sim/ of a folder."""
    live = folder / "live" if single else folder / "live" / replayed.name
    write_live(replayed.live, live)
    if replayed.run is not None and replayed.simulated is not None:
        sim = folder / "sim" if single else folder / "sim" / replayed.name
        write_run(replayed.run, sim)
        write_decisions(replayed.simulated.decisions or [], sim / DECISIONS)


class ProgressLine:
    """The live line of a replay on a terminal: queues and tokens a second."""

    def __init__(self, name: str, total: int, quiet: bool) -> None:
        self.name = name
        self.total = total
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()
        self._said = time.monotonic()

    def __call__(self, state: Mapping[str, Any]) -> None:
        if self.quiet or (not self.terminal and time.monotonic() - self._said < 10):
            return
        self._said = time.monotonic()
        text = (
            f"{self.name}  {state['t']:.1f} s  done {state['done']}/{self.total}  waiting {state['waiting']}  "
            f"running {state['running']}  swapped {state['swapped']}  {state['tokens_per_s']:.0f} tokens/s"
        )
        shown, end = (f"\r{text:<100}", "") if self.terminal else (text, "\n")
        print(shown, end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal and not self.quiet:
            print(file=sys.stderr)


def check_profile(profile: Profile, stage: Stage) -> None:
    """Refuse a profile of another device or kernel set; a fake device is whatever the profile says."""
    if stage.backend != "fake":
        same_device(profile, stage.about)
