"""`sim calibrate vllm`: record the steps of a server under loads, fit them, and check the result with another load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from servesim.calibrate.imports.fit_steps import fit_log, write_log_profile
from servesim.calibrate.imports.step_log import timed_steps
from servesim.calibrate.replay.http_client import Target, replay_against
from servesim.calibrate.replay.replay import ReplayedScenario, replay_requests
from servesim.config.layers import read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.costs.device_profile import Profile, load_profile
from servesim.files.step_table import MeasuredStep
from servesim.files.write import comment, write_yaml
from servesim.version import __version__

from .loads import CHECK_RATE, FIT_RATE, LoadClient, LoadFailed, LoadPlan
from .recording import Recording, front_end_seconds, open_recording

LOAD_TIMES = 3  # all loads together, in seconds of the two with a rate
METRICS = ("makespan", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
LARGE_ERROR = 0.1  # of one of these: the dominant cause is named
HOW = "vllm: recorded steps of the server, host time between them included"
COMMENT = "Settings of the server that `sim calibrate vllm` recorded. The workload is that of its check."
Note = Callable[[str], None]


@dataclass(frozen=True)
class FittedServer:
    """A server whose step times are known: files, and the steps that were fitted."""

    recording: Recording
    steps: Sequence[MeasuredStep]
    profile: Profile
    scenario: Path


def fit_server(target: Target, steps_file: Path, plan: LoadPlan, folder: Path, quiet: bool, note: Note) -> FittedServer:
    """Send the loads, fit the recorded steps, and write profile/ and scenario.yaml of a folder."""
    recording = open_recording(steps_file)
    about = f"vLLM {recording.version}, {recording.model_name}, {recording.header['num_blocks']:,} KV blocks"
    note(f"{about}; the loads take about {max(1, round(LOAD_TIMES * plan.seconds / 60))} min")
    client = LoadClient(target, plan, recording.max_model_len, recording.header["scheduler"]["max_num_seqs"], quiet)
    client.send_singles("warm-up")
    before = len(recording.steps())
    singles = client.send_singles("single requests")
    front_end = front_end_seconds(recording.steps()[before:], singles.sent_requests)
    rate = client.send_bursts()
    note(f"bursts: {rate:.3g} requests/s; loads of {FIT_RATE * rate:.3g} and {CHECK_RATE * rate:.3g} requests/s follow")
    client.send_rate(FIT_RATE * rate)
    steps = recording.steps()[before:]
    write_fit(recording, steps, front_end, folder / "profile")
    workload = plan.workload(CHECK_RATE * rate, recording.max_model_len)
    write_yaml(folder / "scenario.yaml", recording.scenario("profile", workload), comment(COMMENT))
    return FittedServer(recording, steps, load_profile(folder / "profile"), folder / "scenario.yaml")


def write_fit(recording: Recording, steps: Sequence[MeasuredStep], front_end: Optional[float], folder: Path) -> None:
    """Fit recorded steps, and write samples.csv and profile.yaml."""
    header = recording.header
    timed = timed_steps(steps)
    about = {"name": folder.name, "device": header["device"], "model": recording.model}
    fit = fit_log(timed, about, str(recording.path), width=0)  # the warm-up has prepared the shapes
    source = {
        "how": HOW,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"servesim": __version__, "vllm": header["version"]},
        "tensor_parallel": header["parallel"].get("tensor_parallel_size"),
        "front_end": {"seconds": front_end, "lag": None, "end_lag": None},
    }
    write_log_profile(folder, timed, fit, source)


def check_server(target: Target, fitted: FittedServer, quiet: bool) -> ReplayedScenario:
    """Send the workload of the scenario, which has another rate than the fitted loads, simulate it, and compare."""
    scenario = scenario_from(read_scenario_file(fitted.scenario), str(fitted.scenario))
    replayed = replay_against(target, "check", scenario, replay_requests(scenario), fitted.profile, quiet)
    if replayed.interrupted:
        raise KeyboardInterrupt
    if failed := [request for request in replayed.live.requests if request.outcome != "finished"]:
        reasons = "; ".join(replayed.live.extra["reasons"])
        raise LoadFailed(f"check: {len(failed)} of {len(replayed.live.requests)} requests failed: {reasons}")
    return replayed
