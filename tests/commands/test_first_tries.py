"""Common mistakes of new users: one line with a suggestion, never a traceback."""

from __future__ import annotations

import configparser
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
from packaging.requirements import Requirement
from servesim.cli import parser
from servesim.commands.options import leaf_commands
from servesim.core import BadInput
from servesim.core.errors import EXTRAS, missing_package
from servesim.study.executor import dask_pool
from servesim.study.optuna_search import import_optuna

from .. import warm
from ..conftest import ROOT
from .running import Said, run_sim

SWEEP = "base: {workload: {contest: {X: 5, T: 4}}}\nparams: {policy.decode_batch: [8, 16]}\nreplications: 2\n"
TRACE = "arrival,prompt,output\n0,10,20\n1.5,30,5\n"
ODD = "time,input tokens,output tokens\r\n0.0,10,20\r\n1.5,30,5\r\n"


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """Return a function that runs `sim` in a folder with a scenario, a sweep and a trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.yaml").write_text("workload: {contest: {X: 5, T: 4}}\n")
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (tmp_path / "odd.csv").write_text(ODD, newline="")

    return lambda *args: run_sim(capsys, *args)


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


def test_one_objective_needs_no_list(tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP + "objectives: mean_ttft_ms\n")
    assert sim("sweep", "sweep.yaml", "-o", "out", "-q", "-j", "1").out.startswith("rank  mean_ttft (")


@pytest.mark.parametrize(("encoding", "sign"), [("ascii", "+-"), ("utf-8", "±")])
def test_any_terminal_can_show_a_table(
    encoding: str, sign: str, sim: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding=encoding))
    assert sim("sweep", "sweep.yaml", "-q", "-j", "1", "--no-report", "-o", "out").code == 0
    assert f" {sign} " in shown.getvalue().decode(encoding)


def test_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    line = f"{warm.sim()} policies list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("vLLM V1 ") and done.stdout.count("\n") == 1


SLIPS = {
    "a name that is not there": ("view.pool.free", "view.pool.fre", "AttributeError: 'BlockPool' object has no"),
    "hidden state": ("hold=Hold(", "hold=Hold(next(COIN), ", "returned two different plans for the same view"),
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


@pytest.mark.parametrize("package", EXTRAS)
def test_every_package_is_in_its_extra(package: str) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extra = config["options.extras_require"][EXTRAS[package]]
    names = [Requirement(line).name.replace("-", "_") for line in extra.split("\n") if line]
    assert package in names or package == "distributed"  # dask[distributed]


def test_the_command_works_in_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("optuna", "distributed"):
        monkeypatch.setitem(sys.modules, package, None)
    expected = "needs optuna, the extra `search`: run pip install '.[search]' in the clone of servesim"
    assert missing_package("optuna") == expected
    with pytest.raises(BadInput) as search:
        import_optuna()
    assert str(search.value) == expected
    with pytest.raises(BadInput, match=r"^--executor dask: needs distributed, the extra `cluster`: run pip install"):
        dask_pool("127.0.0.1:1")


def test_a_trace_alone_runs_on_the_newest_vllm_and_says_so(sim: Callable[..., Said]) -> None:
    Path("my.csv").write_text(TRACE)
    said = sim("run", "--trace", "my.csv", "-o", "out")
    server = "sim: server: vLLM 0.32.0 with profile h200-llama2-7b, a bundled one; "
    assert said.code == 0 and server in said.error and said.error.count("sim: server:") == 1
    scenario = json.loads(Path("out/manifest.json").read_text())["scenario"]
    assert scenario["policy"]["name"] == "vllm-v1" and scenario["policy"]["max_num_seqs"] == 1024
    assert scenario["engine"]["num_blocks"] > 10_000  # the memory of the device
    own = sim("run", "--trace", "my.csv", "--profile", "ascend910b4-llama2-7b", "--set", "engine.num_blocks=64")
    assert "sim: server: vLLM 0.32.0 with profile ascend910b4-llama2-7b; " in own.error


def test_a_file_without_a_policy_says_which_one_runs(sim: Callable[..., Said]) -> None:
    Path("my.yaml").write_text("workload: {requests: 5, arrivals: {kind: burst}, lengths: {prompt: 9, output: 9}}\n")
    assert "sim: policy: llm-serving, the default; --policy selects another server\n" in sim("run", "my.yaml").error
    assert "the default; --policy" not in sim("run", "my.yaml", "--policy", "llm-serving").error


@pytest.mark.parametrize(
    "words", [("--policy", "vllm"), ("--preset", "sglang-0.5.18"), ("--set", "policy.name=orca"), ("scenario.yaml",)]
)
def test_a_named_server_is_not_replaced(words: tuple[str, ...], sim: Callable[..., Said]) -> None:
    Path("my.csv").write_text(TRACE)
    Path("scenario.yaml").write_text("profile: {base: 0.01}\n")
    said = sim("run", "--trace", "my.csv", *words)
    assert said.code == 0 and "sim: server:" not in said.error
