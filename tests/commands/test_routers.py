"""Routers on the command line: `sim policies`, a user's router in a scenario, and its errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Callable

import pytest
from servesim.routers import ROUTERS

from .running import Said, run_sim

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_router.py"
SCENARIO = """\
workload: {requests: 40, arrivals: {kind: poisson, rate: 20}, lengths: {prompt: 40, output: 8},
           prefixes: {count: 3, tokens: 160}}
policy: vllm-v1
engine: {num_blocks: 400, block_size: 16}
profile: {base: 0.01, prefill_token: 0.001, decode_row: 0.001}
cluster: {replicas: 3, router: mine.py:Spill}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    (tmp_path / "s.yaml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return lambda *args: run_sim(capsys, *args)


def test_a_router_of_a_user_runs(folder: Path, sim: Callable[..., Said]) -> None:
    """It follows the prefix: each of the three is computed on one replica or two."""
    said = sim("run", "s.yaml", "--json")
    assert said.code == 0, said.error
    assert json.loads(said.out)["prefix_hit_rate"] > 0.6


def test_list_show_and_check(folder: Path, sim: Callable[..., Said]) -> None:
    listed = json.loads(sim("policies", "list", "--json").out)["routers"]
    assert [row["name"] for row in listed] == list(ROUTERS)
    assert "most 8 requests that a replica may have more" in " ".join(
        sim("policies", "show", "mine.py:Spill").out.split()
    )
    assert "no fields" in sim("policies", "show", "round-robin").out
    said = sim("policies", "check", "mine.py:Spill", "--set", "most=3")
    assert (said.code, said.out) == (0, "mine.py:Spill: follows the router contract on 8 random workloads\n")


WRONG = {
    "outside": ("return [best", "return [7", 13, "replica 7, expected one of [0, 1, 2]"),
    "nothing": ("return [best", "return None  # [best", 13, "the engine cannot use a result of Spill: TypeError"),
    "own error": ("loads = fleet.memory", "loads = fleet.memry", 14, "AttributeError: 'Fleet' object has no"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_error_of_a_router_is_one_line(name: str, folder: Path, sim: Callable[..., Said]) -> None:
    right, wrong, line, message = WRONG[name]
    file = folder / "mine.py"
    file.write_text(file.read_text().replace(right, wrong))
    said = sim("run", "s.yaml")
    assert said.code == 1 and said.error.count("\n") == 1
    assert f"mine.py:{line}: " in said.error and message in said.error, said.error


def test_a_router_without_choices_does_not_load(folder: Path, sim: Callable[..., Said]) -> None:
    file = folder / "mine.py"
    file.write_text(file.read_text().replace("def choices", "def choose"))
    for said in (sim("run", "s.yaml"), sim("policies", "check", "mine.py:Spill")):
        assert said.code == 2 and "mine.py:8: Spill has no method choices" in said.error, said.error


def test_a_mistake_is_found_by_check(folder: Path, sim: Callable[..., Said]) -> None:
    file = folder / "mine.py"
    file.write_text(file.read_text().replace("loads = ", "fleet.memory.in_flight[0] += 1\n        loads = "))
    said = sim("policies", "check", "mine.py:Spill")
    assert said.code == 1 and "mine.py:13: mine.py:Spill breaks the router contract: " in said.error, said.error
    assert "changed its memory in a choice" in said.error


def test_a_router_that_refuses_is_bad_input(folder: Path, sim: Callable[..., Said]) -> None:
    (folder / "s.yaml").write_text(
        SCENARIO.replace("mine.py:Spill", "{name: conductor, ttft_limit: 0.001, prefill_per_token: 1}")
    )
    said = sim("run", "s.yaml")
    assert (said.code, said.error) == (2, "sim: cluster.router: it refuses request 0; a fleet cannot simulate this\n")
