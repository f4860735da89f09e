"""`sim calibrate vllm`: record the steps of a server under loads, fit them, and check the result with another load.

Every complete load is a line of loads.jsonl, with the steps that belong to it. A calibration that is resumed sends only
the loads that are not in this file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from servesim.calibrate.client.server_counters import read_counters
from servesim.calibrate.imports.fit_steps import fit_log, write_log_profile
from servesim.calibrate.imports.step_log import timed_steps
from servesim.calibrate.replay.http_client import Target, replay_against
from servesim.calibrate.replay.replay import ReplayedScenario, replay_requests
from servesim.config.layers import read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.profile_verdict import MAX_USABLE
from servesim.files.checked import Stored
from servesim.files.step_table import MeasuredStep, read_steps
from servesim.files.write import comment, write_yaml
from servesim.study.journal import Journal
from servesim.version import __version__

from .decisions import compare_decisions
from .loads import CHECK_RATE, EQUAL_REQUESTS, FIT_RATE, LoadClient, LoadFailed, LoadPlan
from .recording import Recording, seconds_outside, seconds_per_request

LOAD_TIMES = 3  # all loads together, in seconds of the two with a rate
METRICS = ("makespan", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
LARGE_ERROR = 0.1  # of one of these: the dominant cause is named
LOADS, SCENARIO, PROFILE = "loads.jsonl", "scenario.yaml", "profile"
HOW = "vllm: recorded steps of the server, host time between them included"
COMMENT = "Settings of the server that `sim calibrate vllm` recorded. The workload is that of its check."
Note = Callable[[str], None]
Send = Callable[[], Any]
Measure = Callable[[Any, Sequence[MeasuredStep]], Any]  # of what was sent and its steps


class LoadLine(Stored):
    """A line of loads.jsonl: a complete load."""

    load: str
    file: str  # of its steps, as seen from the folder
    steps: list[int] = Field(min_length=2, max_length=2)  # the first one, and the first one after it
    measured: Any = None


@dataclass(frozen=True)
class Calibration:
    """A running server with its recorder, and the folder of its calibration."""

    target: Target
    recording: Recording
    folder: Path
    plan: LoadPlan
    command: Sequence[str] = ()  # model and flags of a server that we started
    quiet: bool = True
    note: Note = print

    @property
    def client(self) -> LoadClient:
        recording = self.recording
        return LoadClient(
            self.target, self.plan, recording.max_model_len, recording.header["scheduler"]["max_num_seqs"], self.quiet
        )

    def load(self, name: str, send: Send, measure: Measure) -> Any:
        """Send a load, unless it is complete, and note its steps and what was measured. Return what was measured."""
        done = self.loads().get(name)
        if done is None:
            first = len(self.recording.steps())
            sent, steps = send(), self.recording.steps()
            file = os.path.relpath(self.recording.path, self.folder)  # the working folder may be another one next time
            done = {"load": name, "file": file, "steps": [first, len(steps)]}
            done["measured"] = measure(sent, steps[first:])
            with Journal(self.folder / LOADS, LoadLine) as journal:
                journal.append([done])
        return done["measured"]

    def loads(self) -> dict[str, dict[str, Any]]:
        """Return the complete loads by name."""
        if not (self.folder / LOADS).exists():
            return {}
        with Journal(self.folder / LOADS, LoadLine) as journal:
            return {row["load"]: row for row in journal.records}

    def fitted_steps(self) -> list[MeasuredStep]:
        """Return the steps of all complete loads."""
        steps = []
        for load in self.loads().values():
            steps += read_steps(self.folder / load["file"])[slice(*load["steps"])]
        return steps


@dataclass(frozen=True)
class FittedServer:
    """A server whose step times are known: files, the steps that were fitted, and those of the check."""

    recording: Recording
    steps: Sequence[MeasuredStep]
    profile: Profile
    scenario: Path
    checked: Sequence[MeasuredStep] = ()


def start(calibration: Calibration) -> float:
    """Warm up the server and return the noise of the machine, before the first load."""
    recording, client, note = calibration.recording, calibration.client, calibration.note
    about = f"vLLM {recording.version}, {recording.model_name}, {recording.header['num_blocks']:,} KV blocks"
    note(f"{about}; the loads take about {max(1, round(LOAD_TIMES * calibration.plan.seconds / 60))} min")
    before = len(recording.steps())
    client.send_equal("first request", 1)
    if len(recording.steps()) == before:
        raise BadInput(
            f"{recording.path}: no step was recorded: {calibration.target.url} runs without vLLM's "
            "recorder, or SERVESIM_STEPS of the server names another file"
        )
    client.send_singles("warm-up")
    noise = relative_spread(client.send_equal("equal requests", EQUAL_REQUESTS))
    busy = f"busy: expect errors of +-{noise:.0%}; stop other programs" if noise > MAX_USABLE else "quiet enough"
    note(f"noise of the machine: equal requests differ by +-{noise:.0%}: {busy}")
    return noise


def relative_spread(seconds: Sequence[float]) -> float:
    """Return half of the range that holds most of these times, as a part of their median."""
    low, median, high = np.percentile(seconds, (10, 50, 90))
    return float((high - low) / 2 / median)


def fit_server(calibration: Calibration, noise: float) -> FittedServer:
    """Send the loads that are not complete, fit the recorded steps, and write profile/ and scenario.yaml."""
    recording, client, plan = calibration.recording, calibration.client, calibration.plan
    before = read_counters(calibration.target.url)
    outside = calibration.load("single requests", lambda: client.send_singles("single requests"), seconds_outside)
    rate, per_request = calibration.load(
        "bursts", client.send_bursts, lambda sent, steps: (sent.rate, seconds_per_request(steps, sent.sizes))
    )
    calibration.note(
        f"bursts: {rate:.3g} requests/s; loads of {FIT_RATE * rate:.3g} and {CHECK_RATE * rate:.3g} requests/s follow"
    )
    calibration.load("rate", lambda: client.send_rate(FIT_RATE * rate), lambda sent, steps: FIT_RATE * rate)
    workload = plan.workload(CHECK_RATE * rate, recording.max_model_len)
    drafts = recording.speculative(before, read_counters(calibration.target.url))
    scenario = {**recording.scenario(PROFILE, workload), **drafts}
    if drafts:
        calibration.note(f"drafts of these loads, as the server counts them: {drafts}".replace("'", ""))
    settings: dict[str, Any] = {
        name: scenario[name] for name in ("policy", "engine", "speculative") if name in scenario
    }
    server = {"command": list(calibration.command), **settings}
    steps = calibration.fitted_steps()
    front_end = {"seconds": None if outside is None else max(0.0, outside - per_request), "per_request": per_request}
    about: dict[str, Any] = {"front_end": front_end, "server": server, "check": {"noise": noise}}
    if drafts:
        about["drafting"] = {"method": drafts["speculative"].get("method"), "step": 0.0}  # it is part of the steps
    write_fit(recording, steps, calibration.folder / PROFILE, about)
    write_yaml(calibration.folder / SCENARIO, scenario, comment(COMMENT))
    return read_fit(calibration)


def read_fit(calibration: Calibration) -> FittedServer:
    """Return the fit in the folder of a calibration."""
    folder = calibration.folder
    return FittedServer(
        calibration.recording, calibration.fitted_steps(), load_profile(folder / PROFILE), folder / SCENARIO
    )


def write_fit(recording: Recording, steps: Sequence[MeasuredStep], folder: Path, about: Mapping[str, Any]) -> None:
    """Fit recorded steps, and write samples.csv and profile.yaml with further keys."""
    header = recording.header
    timed = timed_steps(steps)
    fitted = {"name": folder.name, "device": header["device"], "model": recording.model}
    profile, slow = fit_log(timed, fitted, str(recording.path), width=0)  # the warm-up has prepared the shapes
    source = {
        "how": HOW,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"servesim": __version__, "vllm": header["version"]},
        "tensor_parallel": header["parallel"].get("tensor_parallel_size"),
        **about,
    }
    write_log_profile(folder, timed, slow, profile, source)


def check_server(calibration: Calibration, fitted: FittedServer) -> tuple[FittedServer, ReplayedScenario]:
    """Send the workload of the scenario, which has another rate than the fitted loads, simulate it, and compare.

    The settings are those of the server, which may be others than those that were fitted.
    """
    recording, tree = calibration.recording, read_scenario_file(fitted.scenario)
    scenario = scenario_from({**tree, **recording.scenario(tree["profile"], tree["workload"])}, str(fitted.scenario))
    requests, before = replay_requests(scenario), len(recording.steps())
    replayed = replay_against(calibration.target, "check", scenario, requests, fitted.profile, calibration.quiet)
    if replayed.interrupted:
        raise KeyboardInterrupt
    if failed := [request for request in replayed.live.requests if request.outcome != "finished"]:
        reasons = "; ".join(replayed.live.extra["reasons"])
        raise LoadFailed(f"check: {len(failed)} of {len(replayed.live.requests)} requests failed: {reasons}")
    assert replayed.comparison is not None
    checked = recording.steps()[before:]
    replayed.comparison.decisions = compare_decisions(scenario, requests, checked, fitted.profile)
    return replace(fitted, checked=checked), replayed


def with_check(profile: Profile, replayed: ReplayedScenario, noise: float) -> Profile:
    """Return a profile with the errors of a check, from which its verdict follows."""
    assert replayed.comparison is not None
    errors = {row.metric: row.error for row in replayed.comparison.rows if row.is_time and row.error is not None}
    return replace(profile, about={**profile.about, "check": {"noise": noise, "errors": errors}})
