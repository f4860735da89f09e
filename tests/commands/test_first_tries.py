"""Common mistakes of new users: one line with a suggestion, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
from servesim.cli import parser
from servesim.commands.options import leaf_commands

from ..conftest import ROOT
from .running import Said, run_sim

SWEEP = "base: {workload: {contest: {X: 5, T: 4}}}\nparams: {policy.decode_batch: [8, 16]}\nreplications: 2\n"
ODD = "time,input tokens,output tokens\r\n0.0,10,20\r\n1.5,30,5\r\n"
NAMED = ("--column", "arrival=time", "--column", "prompt=input tokens", "--column", "output=output tokens")


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """Return a function that runs `sim` in a folder with a scenario, a sweep and a trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.yaml").write_text("workload: {contest: {X: 5, T: 4}}\n")
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (tmp_path / "odd.csv").write_text(ODD, newline="")

    return lambda *args: run_sim(capsys, *args)


MEANT = {
    "rum": "no command rum; known: run, explore, sweep,",
    "run --ploicy vllm": "sim run: unrecognized arguments: --ploicy; did you mean --policy?",
    "run -X many": "sim run: argument -X: invalid float value: 'many'; see sim run --help",
    "run": "expected a trace or a workload, got neither; try --trace FILE or `sim config init FILE`",
    "run -T 5": "-T: also needs -X",
    "run --column prompt=in -X 5": "--column: also needs --trace FILE",
    "run -X 5 --policy vlm": "did you mean vllm?",
    "run -X 5 --policy vllm-0.8.5": "vllm-0.8.5 is a preset: --preset vllm-0.8.5",
    "run -X 5 --preset vllm": "vllm is a policy: --policy vllm",
    "run -X 5 --preset contest-basline": "did you mean contest-baseline?",
    "run -X 5 --set decode_batch=4": "did you mean policy.decode_batch?",
    "run -X 5 --set num_blocks=4": "did you mean engine.num_blocks?",
    "run -X 5 --set engine.num_bloks=4": "did you mean num_blocks?",
    "run -X 5 --set policy.decod_batch=4": "did you mean decode_batch?",
    "run -X 5 --set engine=4": "engine: expected keys and values, got 4",
    "run -X 5 --set seed=1 --set seed.x=4": "--set seed.x=4: expected a section that holds x, got 1",
    "run -X 5 --set engine.num_blocks=1:30": "engine.num_blocks: expected a valid integer, got '1:30'",
    "run -X 5 -T 1e12": "expected at most 10,000,000 requests, got 5,000,000,000,000",
    "run sweep.yaml": "base: unknown key",
    "sweep scenario.yaml": "this is a scenario key",
    "run --trace odd.csv": "or name your columns with --column arrival=... --column prompt=... --column output=...",
    "report .": "it has no experiment.json",
}


@pytest.mark.parametrize("line", MEANT)
def test_mistake_gives_one_line_with_a_suggestion(line: str, sim: Callable[..., Said]) -> None:
    said = sim(*line.split())
    assert said.code == 2
    assert len(said.error.splitlines()) == 1, said.error
    assert MEANT[line] in said.error


def test_sim_alone_shows_five_tasks_whose_commands_exist(sim: Callable[..., Said]) -> None:
    said = sim()
    assert (said.code, said.error) == (0, "")
    tasks = [line.split() for line in said.out.splitlines() if line.startswith("  sim ")]
    assert len(tasks) == 5
    parsers = {command.prog: command for command in leaf_commands(parser())}
    for words in tasks:
        name = f"sim {words[1]} {words[2]}" if f"sim {words[1]} {words[2]}" in parsers else f"sim {words[1]}"
        assert {word for word in words if word.startswith("--")} <= set(parsers[name]._option_string_actions)
    assert said.out.endswith("sim --help lists all commands.\n")


def test_every_command_takes_quiet() -> None:
    for command in leaf_commands(parser()):
        assert {"-q", "--quiet"} <= set(command._option_string_actions), command.prog


def test_quiet_prints_no_notes(tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "zero.csv").write_text("arrival,prompt,output\n5,8,0\n6,8,3\n")
    for line in (f"run --trace {tmp_path}/zero.csv", f"trace convert {tmp_path}/zero.csv -o {tmp_path}/out.csv"):
        loud, quiet = sim(*line.split()), sim(*line.split(), "-q")
        assert "1 of 2 rows skipped" in loud.error and quiet.error == ""
        assert quiet.out == loud.out and quiet.code == loud.code == 0
    assert sim("run", "--trace", "nowhere.csv", "-q").error.startswith("sim: nowhere.csv"), "errors are no notes"


@pytest.mark.parametrize("line", ["trace", "calibrate", "config"])
def test_command_without_subcommand_shows_the_subcommands(line: str, sim: Callable[..., Said]) -> None:
    said = sim(*line.split())
    assert said.code == 2
    assert said.error.startswith(f"usage: sim {line} COMMAND ...".replace("  ", " "))


@pytest.mark.parametrize(
    "line", ["serve scenario.yaml --backend fake", "replay scenario.yaml --url http://127.0.0.1:1 --api llm-serving"]
)
def test_missing_package_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text("workload: {contest: {X: 5, T: 4}}\n")
    without = "import sys; sys.modules['aiohttp'] = None; from servesim.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", without, *line.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "sim: needs aiohttp, the extra `replay`: run pip install '.[replay]' in the clone of servesim\n"
    )


def test_help_is_a_command_too(sim: Callable[..., Said]) -> None:
    assert sim("help").out == sim("--help").out
    assert sim("help", "run").out == sim("run", "--help").out


def test_policies_without_action_lists_them(sim: Callable[..., Said]) -> None:
    assert sim("policies") == sim("policies", "list")


def test_user_csv_is_read_by_column_names(sim: Callable[..., Said]) -> None:
    said = sim("run", "--trace", "odd.csv", *NAMED)
    assert said.code == 0
    assert "Total input tokens:                                     40" in said.out


def test_one_objective_needs_no_list(tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP + "objectives: mean_ttft_ms\n")
    assert sim("sweep", "sweep.yaml", "-o", "out", "-q", "-j", "1").out.startswith("rank  mean_ttft_ms ")


def test_every_line_of_the_table_has_the_same_width(sim: Callable[..., Said]) -> None:
    lines = sim("run", "scenario.yaml").out.splitlines()
    last = max(index for index, line in enumerate(lines) if line == "=" * 58)
    assert {len(line) for line in lines[: last + 1] if not line.endswith(":")} == {58}


@pytest.mark.parametrize(("encoding", "sign"), [("ascii", "+-"), ("latin-1", "±"), ("utf-8", "±")])
def test_any_terminal_can_show_a_table(encoding: str, sign: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    done = subprocess.run(
        [sys.executable, "-m", "servesim", "sweep", "sweep.yaml", "-q", "-j", "1", "-o", "out"],
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=True,
    )  # fmt: skip
    assert f" {sign} " in done.stdout.decode(encoding)


def test_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    line = f"{sys.executable} -m servesim policies list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("vLLM V1 ") and done.stdout.count("\n") == 1


SLIPS = {
    "a name that is not there": ("view.pool.free", "view.pool.fre", "AttributeError: 'BlockPool' object has no"),
    "hidden state": ("hold=FOREVER", "hold=next(COIN)", "returned two different plans for the same view"),
    "no plan at all": ("return Plan(chunks=chunks)", "return None", "decide returned a NoneType, expected a Plan"),
    "more than there is": ("blocks > free or ", "", "the plan needs 22 more blocks than are free"),
}


def test_changed_policy_file_is_loaded_again(tmp_path: Path, sim: Callable[..., Said]) -> None:
    own(tmp_path, "batch: int = 64", "batch: int = 7")
    assert "batch 7 " in " ".join(sim("policies", "show", "mine.py:Gather").out.split())
    own(tmp_path, "batch: int = 64", "batch: int = 8")
    assert "batch 8 " in " ".join(sim("policies", "show", "mine.py:Gather").out.split())


def own(folder: Path, right: str = "", wrong: str = "") -> None:
    """Write a user policy with a mistake in it."""
    text = (ROOT / "examples" / "my_policy.py").read_text(encoding="utf-8").replace(right, wrong)
    (folder / "mine.py").write_text(f"import itertools\n{text}\nCOIN = itertools.count(1)\n")


@pytest.mark.parametrize("slip", SLIPS)
def test_check_finds_a_mistake_in_a_user_policy(slip: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    right, wrong, message = SLIPS[slip]
    own(tmp_path, right, wrong)
    said = sim("policies", "check", "mine.py:Gather")
    assert said.code == 1
    assert len(said.error.splitlines()) == 1, said.error
    assert message in said.error


def test_correct_policy_passes_the_check(sim: Callable[..., Said], tmp_path: Path) -> None:
    own(tmp_path, "nothing", "nothing")
    said = sim("policies", "check", "mine.py:Gather", "--set", "batch=4")
    assert said.code == 0
    assert said.out.startswith("mine.py:Gather: follows the policy contract on 8 random workloads")


def test_error_in_a_user_policy_names_its_line(sim: Callable[..., Said], tmp_path: Path) -> None:
    own(tmp_path, "view.pool.free", "view.pool.fre")
    line = 1 + (tmp_path / "mine.py").read_text().split("view.pool.fre")[0].count("\n")
    place = f"{tmp_path / 'mine.py'}:{line}: AttributeError"
    said = sim("run", "scenario.yaml", "--policy", "mine.py:Gather")
    assert said.code == 1
    assert said.error.startswith(f"sim: {place}")
    (tmp_path / "sweep.yaml").write_text(SWEEP.replace("decode_batch", "batch"))
    swept = sim("sweep", "sweep.yaml", "--set", "policy={name: 'mine.py:Gather'}", "-o", "out", "-q", "-j", "1")
    assert swept.code == 1
    assert swept.error.startswith(f"sim: every run failed; the first error is: {place}")


def test_policy_file_without_a_class_name_lists_its_classes(sim: Callable[..., Said], tmp_path: Path) -> None:
    own(tmp_path, "nothing", "nothing")
    said = sim("run", "scenario.yaml", "--policy", "mine.py")
    assert said.error == "sim: scenario.yaml: policy mine.py: expected a Policy class, e.g. mine.py:Gather\n"
