"""Files that a scenario names are found beside its file, then in the working folder; best.yaml runs from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from servesim.config.layers import read_scenario_file, read_sweep_file
from servesim.config.paths import relative_paths, resolve_paths

from ..commands.running import run_sim
from ..conftest import ROOT

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,20,3\n0.5,30,4\n"
PROFILE = "cost: {base: 0.001}\n"
EXAMPLE = (ROOT / "examples" / "my_policy.py").read_text(encoding="utf-8")
SCENARIO = """\
trace: trace.csv
policy: {name: "mine.py:Gather", batch: 4}
profile: device
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a scenario, a sweep and all files that they name. It is the working folder."""
    folder = tmp_path / "project"
    (folder / "device").mkdir(parents=True)
    for name, text in (
        ("trace.csv", TRACE), ("mine.py", EXAMPLE), ("device/profile.yaml", PROFILE), ("scenario.yaml", SCENARIO),
        ("sweep.yaml", "base: scenario.yaml\nparams: {policy.batch: [4, 8]}\n"),
    ):  # fmt: skip
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def test_a_scenario_finds_its_files_from_the_folder_above(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.parent)
    said = run_sim(capsys, "run", "project/scenario.yaml")
    assert (said.code, said.error) == (0, "")


def test_best_yaml_has_paths_relative_to_itself_and_runs_from_another_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sim(capsys, "sweep", "sweep.yaml", "-j", "1", "-q", "--no-report", "-o", "runs/first").code == 0
    best = yaml.safe_load((project / "runs/first/best.yaml").read_text())
    assert best["trace"] == "../../trace.csv"
    assert best["policy"]["name"] == "../../mine.py:Gather"
    assert best["profile"] == "../../device"
    expected = run_sim(capsys, "run", "scenario.yaml", "--json", "--set", f"policy.batch={best['policy']['batch']}")
    assert run_sim(capsys, "run", "runs/first/best.yaml", "--json").out == expected.out
    other = project.parent / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    refused = run_sim(capsys, "run", "../project/runs/first/best.yaml", "--json")
    assert refused.code == 2 and "is outside the working folder" in refused.error
    assert run_sim(capsys, "run", "../project/runs/first/best.yaml", "--json", "--trust").out == expected.out


def test_capacity_writes_relative_paths(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = "workload: {requests: 20, arrivals: {kind: poisson, rate: 1}, lengths: {prompt: 8, output: 2}}\n"
    (project / "load.yaml").write_text(f"{workload}profile: device\npolicy: vllm\n")
    said = run_sim(
        capsys, "capacity", "load.yaml", "--subject-to", "p99_ttft_ms<=50", "-j", "1", "-q", "-o", "deep/out"
    )
    assert said.code == 0
    assert yaml.safe_load((project / "deep/out/best.yaml").read_text())["profile"] == "../../device"


def test_a_file_of_another_folder_is_refused_even_if_the_working_folder_has_its_name(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file beside the scenario is meant, so the file of the working folder must not run instead of it."""
    work = project.parent / "work"
    work.mkdir()
    (work / "mine.py").write_text(EXAMPLE)
    monkeypatch.chdir(work)
    said = run_sim(capsys, "run", "../project/scenario.yaml")
    assert said.code == 2 and f"{project / 'mine.py'} is outside the working folder" in said.error


def test_a_file_that_is_not_beside_the_scenario_is_found_in_the_working_folder(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "scenarios").mkdir()
    (project / "scenarios" / "old.yaml").write_text(SCENARIO)
    assert run_sim(capsys, "run", "scenarios/old.yaml").code == 0


def test_parameters_of_a_sweep_name_files_beside_the_sweep(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "sweep.yaml").write_text(
        "base: {trace: trace.csv}\nbaseline: {profile: device}\n"
        "params: [{policy.name: [vllm, 'mine.py:Gather'], profile: [device, h200-llama2-7b]}]\n"
    )
    monkeypatch.chdir(project.parent)
    tree = read_sweep_file("project/sweep.yaml")
    assert tree == {
        "base": {"trace": "project/trace.csv"},
        "baseline": {"profile": "project/device"},
        "params": [
            {
                "policy.name": ["vllm", "project/mine.py:Gather"],
                "profile": ["project/device", "h200-llama2-7b"],
            }
        ],
    }


def test_workloads_have_paths_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "workload: {mix: [{contest: {X: 1, T: 9, lengths: trace.csv}}, {lengths: {kind: trace, path: trace.csv}}]}"
    (project / "mix.yaml").write_text(text)
    monkeypatch.chdir(project.parent)
    mix = read_scenario_file("project/mix.yaml")["workload"]["mix"]
    assert mix[0]["contest"]["lengths"] == mix[1]["lengths"]["path"] == "project/trace.csv"


def test_relative_paths_are_the_inverse_of_resolving(project: Path) -> None:
    tree = {
        "trace": {"path": "trace.csv", "tokenizer": str(project / "trace.csv")},
        "policy": "mine.py",
        "profile": "h200-llama2-7b",
    }
    written = relative_paths(tree, project / "runs" / "a")
    assert written["trace"] == {"path": "../../trace.csv", "tokenizer": str(project / "trace.csv")}
    assert written["policy"] == "../../mine.py" and written["profile"] == "h200-llama2-7b"
    (project / "runs" / "a").mkdir(parents=True)
    assert resolve_paths(written, Path("runs/a")) == tree


def test_a_linked_folder_does_not_change_the_meaning_of_the_parent_folder(project: Path) -> None:
    (project / "far" / "runs").mkdir(parents=True)
    (project / "link").symlink_to("far/runs")
    written = relative_paths({"trace": "trace.csv"}, Path("link"))
    assert written == {"trace": "../../trace.csv"}
    found = resolve_paths(written, Path("link"))["trace"]
    assert Path(found).samefile("trace.csv")


@pytest.mark.parametrize("trace", [7, "", "a\0b", "x" * 5000, {"path": None}])
def test_wrong_paths_stay_for_the_check_of_the_scenario(project: Path, trace: object) -> None:
    assert resolve_paths({"trace": trace, "policy": trace, "workload": trace, "profile": trace}, Path()) == {
        "trace": trace, "policy": trace, "workload": trace, "profile": trace
    }  # fmt: skip
