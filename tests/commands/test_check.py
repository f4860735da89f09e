"""`sim check` in a repository: a pull request that changes a flag, and the workflow of docs/ci.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from servesim import __version__
from servesim.core.errors import EXTRAS
from servesim.files.yaml_reader import parse

from .. import warm
from ..conftest import ROOT
from .running import run_sim

PAGE = ROOT / "docs" / "ci.md"
WORKFLOW, SCENARIO = ".github/workflows/serving.yml", "serving/scenario.yaml"
OLD, NEW = "max_num_seqs: 64", "max_num_seqs: 12"
BOUNDS = ("--subject-to", "p99_ttft_ms <= 250", "--subject-to", "mean_tpot_ms <= 1.02 * baseline")


def block(name: str) -> str:
    """Return a file of docs/ci.md."""
    [text] = re.findall(rf"^```yaml {re.escape(name)}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return str(text)


def steps() -> list[dict[str, Any]]:
    """Return the steps of the workflow."""
    jobs = parse(block(WORKFLOW), WORKFLOW)["jobs"]
    result: list[dict[str, Any]] = jobs["check"]["steps"]
    return result


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with the scenario of the page on `main`, and a change of a flag on another branch."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "repository"
    (folder / "serving").mkdir(parents=True)
    file = folder / SCENARIO
    file.write_text(block(SCENARIO))
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "scenario")
    git(folder, "checkout", "-q", "-b", "change")
    assert OLD in file.read_text()
    file.write_text(file.read_text().replace(OLD, NEW))
    git(folder, "commit", "-q", "-a", "-m", "smaller batches")
    git(folder, "worktree", "add", "-q", "base", "main")  # as the second checkout of the workflow
    return folder


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *who, *words], cwd=folder, check=True)


def test_a_changed_flag_breaks_a_limit(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repository)
    words = ("check", SCENARIO, "--baseline", f"base/{SCENARIO}", *BOUNDS, "-j", "1")
    files = ("--junit", "out/check.xml", "--summary", "summary.md")
    said = run_sim(capsys, *words, "--replications", "4", "--intervals", "6", *files)
    assert said.code == 3, said.error
    scenario, baseline, head, *rows = said.out.splitlines()
    assert (scenario, baseline) == (f"scenario: {SCENARIO}", f"baseline: base/{SCENARIO}")
    assert head.split() == ["constraint", "limit", "value", "baseline", "change", "verdict"]
    found = {line.split("  ")[0]: line.split()[-1] for line in rows[:3]}
    verdicts = {BOUNDS[1]: "broken", BOUNDS[3]: "met", "failed <= baseline": "met"}
    assert found == verdicts
    assert rows[3].startswith(f"Broken: {BOUNDS[1]}. 95 % intervals of 4 replications and 6 draws")
    suite = ElementTree.parse(repository / "out" / "check.xml").getroot()[0]
    failed = {case.get("name"): case.find("failure") is not None for case in suite.iter("testcase")}
    assert failed == {name: verdict == "broken" for name, verdict in verdicts.items()}
    summary = (repository / "summary.md").read_text()
    assert summary.startswith("## Broken: scenario serving/scenario.yaml; baseline base/serving/scenario.yaml\n")
    assert summary.count("**met**") == 2 and summary.count("**broken**") == 1
    git(repository, "checkout", "-q", "change~1")
    same = run_sim(capsys, *words, "--replications", "2", "--intervals", "2")
    assert same.code == 0 and "All constraints are met." in same.out


def test_the_workflow_runs_for_pull_requests_and_keeps_the_files() -> None:
    workflow = parse(block(WORKFLOW), WORKFLOW)
    assert set(workflow) == {"name", "on", "permissions", "jobs"}
    assert workflow["permissions"] == {"contents": "read"}
    paths = workflow["on"]["pull_request"]["paths"]
    assert WORKFLOW in paths and f"{SCENARIO.split('/')[0]}/**" in paths
    [job] = workflow["jobs"].values()
    assert set(job) == {"runs-on", "timeout-minutes", "steps"}
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step) and set(step) <= {"name", "uses", "with", "run", "if"}
        if "uses" in step:
            assert re.fullmatch(r"actions/(checkout|setup-python|upload-artifact)@v\d+", step["uses"])
    here, base = (step.get("with") for step in job["steps"][:2])
    assert here is None and base == {"ref": "${{ github.base_ref }}", "path": "base"}
    install, check = (step["run"] for step in job["steps"] if "run" in step)
    assert install == f"pip install wheels/servesim-{__version__}-py3-none-any.whl"
    upload = job["steps"][-1]
    assert upload["if"] == "always()" and f"--junit {upload['with']['path']} " in check


def test_the_command_of_the_workflow_fails_for_the_changed_flag(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = [step["run"] for step in steps() if step.get("run", "").startswith("sim ")]
    program = tmp_path / "bin" / "sim"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{warm.sim()}" "$@" -j 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", line]  # as GitHub runs it
    done = subprocess.run(shell, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "summary").read_text().startswith("## Broken: ")
    [suite] = ElementTree.parse(repository / "check.xml").getroot()
    assert suite.get("failures") == "1"


def test_a_check_needs_no_optional_package(repository: Path) -> None:
    """The packages of the extras, and those that only draw, do not load."""
    blocked = (*EXTRAS, "matplotlib", "plotly", "jinja2", "selenium")
    lines = (
        "import sys",
        f"sys.modules.update(dict.fromkeys({blocked!r}))",
        "from servesim.cli import main",
        f"sys.exit(main(['check', {SCENARIO!r}, '--subject-to', 'makespan <= 1e9', '--replications', '2', '-j', '1',"
        " '--intervals', '2', '--junit', 'check.xml', '--summary', 'summary.md']))",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
