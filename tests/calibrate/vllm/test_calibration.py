"""Profile and scenario from a recording of a real vLLM server, its prediction of a measured run, causes of errors."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servesim.calibrate.client.load_generator import SentRequest
from servesim.calibrate.replay.http_client import Target
from servesim.calibrate.replay.replay import ReplayedScenario, replay_requests
from servesim.calibrate.replay.verify import compare
from servesim.calibrate.vllm import recording as recording_module
from servesim.calibrate.vllm.calibration import METRICS, Calibration, FittedServer, relative_spread, start, write_fit
from servesim.calibrate.vllm.causes import dominant_cause
from servesim.calibrate.vllm.loads import LoadClient, LoadPlan
from servesim.calibrate.vllm.recording import Recording, open_recording, seconds_outside
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request
from servesim.costs.derived import ScaledCost
from servesim.costs.device_profile import Profile, load_profile
from servesim.runs.run_folder import read_run, run_data
from servesim.runs.simulate import simulate
from servesim.traces.trace import Trace

FIRST_CHECKED = 1075  # step of the recording; earlier ones are fitted
FRONT_END = 0.0097  # seconds, measured with single requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the recording, its profile and its scenario."""
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module")
def recording(recordings: Path, folder: Path) -> Iterator[Recording]:
    """The steps of vLLM 0.32.0 on a CPU, with its default flags."""
    path = folder / "steps.jsonl"
    path.write_bytes(gzip.decompress((recordings / "vllm-server" / "steps.jsonl.gz").read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_module, "WRITTEN_S", 0.0)
        yield open_recording(path)


@pytest.fixture(scope="module")
def fitted(recording: Recording, folder: Path) -> FittedServer:
    every = recording.steps()
    steps = [step for step in every if step.number < FIRST_CHECKED]
    write_fit(recording, steps, folder / "profile", {"front_end": {"seconds": FRONT_END}})
    profile, checked = load_profile(folder / "profile"), every[len(steps) :]
    return FittedServer(recording, steps, profile, folder / "scenario.yaml", checked)


def compared(fitted: FittedServer, recordings: Path, profile: Profile) -> ReplayedScenario:
    """Simulate the requests of the measured run, and compare."""
    measured = read_run(recordings / "vllm-server" / "live")
    assert measured.scenario is not None and measured.scenario.workload is not None
    tree = fitted.recording.scenario(str(profile.path), measured.scenario.workload)
    scenario = scenario_from(tree)
    assert scenario.policy == measured.scenario.policy
    requests = replay_requests(scenario)
    run = simulate(scenario, Trace(list(requests), "replay", "synth"), profile=profile)
    live: Any = SimpleNamespace(requests=requests)
    return ReplayedScenario("check", live, measured, run, run_data(run), compare(run_data(run), measured))


def test_a_load_that_was_not_fitted_is_predicted(fitted: FittedServer, recordings: Path) -> None:
    """Measured on an idle machine, at another rate than the fitted loads."""
    replayed = compared(fitted, recordings, fitted.profile)
    errors = {metric: replayed.comparison.row(metric).error for metric in METRICS}
    assert all(error is not None and abs(error) < 0.06 for error in errors.values()), errors
    assert dominant_cause(fitted, replayed) is None


def test_the_scenario_of_an_older_version_has_only_its_settings(recording: Recording) -> None:
    old = replace(recording, header={**recording.header, "version": "0.14.0"})
    policy = old.scenario("p", {})["policy"]
    assert policy["version"] == "0.14.0" and policy["max_num_seqs"] == 128
    assert not {"watermark", "max_num_active_seqs"} & set(policy)
    made: Any = scenario_from({**old.scenario("ascend910b4-llama2-7b", {}), "workload": None}).make_policy()
    assert made.version == "0.14.0" and made.scheduler_reserve_full_isl is False


def test_the_front_end_is_the_time_outside_the_engine(recording: Recording) -> None:
    steps = recording.steps()
    ids = [f"r{number}" for number in range(12, 24)]  # single requests
    single = [step for step in steps if step.requests & set(ids)]
    sent = []
    for id in ids:
        own = [step for step in single if id in step.requests]
        engine = (own[-1].end or 0.0) - (own[0].start or 0.0)
        sent.append(SentRequest(Request(id, 0.0, 1, 1), 0.0, sent_at=5.0, times=[5.0 + engine + 0.012]))
    load: Any = SimpleNamespace(sent_requests=sent)
    assert seconds_outside(load, single) == pytest.approx(0.012)
    load.sent_requests = sent[:-1]
    assert seconds_outside(load, single) is None  # a request of another client


def with_error(replayed: ReplayedScenario, metric: str, error: float) -> ReplayedScenario:
    """Change the measured value of a metric, so that it has this error."""
    assert replayed.comparison is not None
    rows = replayed.comparison.rows
    value = (replayed.comparison.row(metric).simulated or 0.0) / (1 + error)
    changed = [replace(row, measured=value) if row.metric == metric else row for row in rows]
    return replace(replayed, comparison=replace(replayed.comparison, rows=changed))


def test_a_cause_is_named_if_the_error_disappears_without_it(fitted: FittedServer, recordings: Path) -> None:
    slow = replace(fitted.profile, cost=ScaledCost(fitted.profile.cost, 1.5))
    cause = dominant_cause(replace(fitted, profile=slow), compared(fitted, recordings, slow))
    assert cause is not None
    assert re.search(r"^step times: the steps of the check took 3\d\.\d% less than predicted \(explains \w+ \+", cause)
    late = replace(fitted.profile, about={**fitted.profile.about, "front_end": {"seconds": 0.3}})
    cause = dominant_cause(replace(fitted, profile=late), compared(fitted, recordings, late))
    assert cause is not None and cause.startswith("front end: ") and "300 ms simulated" in cause


def test_no_cause_is_named_if_none_explains_the_error(fitted: FittedServer, recordings: Path) -> None:
    """Steps that took less time than predicted do not explain a TTFT that was longer than predicted."""
    slow = replace(fitted.profile, cost=ScaledCost(fitted.profile.cost, 1.035))
    replayed = with_error(compared(fitted, recordings, slow), "mean_ttft_ms", -0.24)
    cause = dominant_cause(replace(fitted, profile=slow), replayed)
    assert cause is not None
    assert cause.startswith("not found: nothing that was measured explains mean_ttft_ms -24.0%")
    assert "step times: the steps of the check took 3." in cause and "sim policies prove" in cause


def test_a_server_without_the_recorder_is_noticed_after_one_request(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the steps of an earlier server: no new one comes."""
    sent = list[str]()
    monkeypatch.setattr(LoadClient, "send_equal", lambda client, name, count: sent.append(name))
    calibration = Calibration(Target("http://127.0.0.1:9"), recording, tmp_path, LoadPlan())
    with pytest.raises(BadInput, match=r"no step was recorded: http://127\.0\.0\.1:9 runs without vLLM's recorder"):
        start(calibration)
    assert sent == ["first request"]
    with pytest.raises(BadInput, match=r"none\.jsonl: no such file; expected that of vLLM's recorder \(SERVESIM_STEPS"):
        open_recording(tmp_path / "none.jsonl")


def test_the_noise_of_a_machine_is_the_spread_of_equal_requests() -> None:
    assert relative_spread([1.0] * 12) == 0.0
    assert relative_spread([0.8, 0.8, 1.0, 1.0, 1.0, 1.0, 1.2, 1.2]) == pytest.approx(0.2)
