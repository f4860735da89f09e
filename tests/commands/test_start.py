"""What a command must not load or do before it does its work."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import pytest
from servesim.cli import main
from servesim.core import Policy
from servesim.costs.device_profile import bundled_profiles, check_file
from servesim.files.yaml_reader import read_yaml
from servesim.policies import FAMILIES, POLICIES
from servesim.routers import ROUTERS, Router

SLOW = {"pandas", "scipy", "matplotlib", "jinja2", "optuna", "aiohttp", "distributed"}
RUN = """
import sys
from servesim.cli import main
assert main(["run", sys.argv[1], "-q"]) == 0
print("loaded:", *sys.modules)
"""
SCENARIO = """
profile: h200-llama2-7b
policy: vllm-v1
workload: {requests: 10, arrivals: {kind: poisson, rate: 5}, lengths: {prompt: 200, output: 50}}
"""
# A run without these sections and options does not need the parts of the library that serve them.
UNUSED = {
    "calibrate.adapter", "calibrate.device", "config.policy_list", "config.schema", "costs.profile_file", "report",
    "runs.decision_log", "runs.run_folder", "runs.timeline", "study", "traces.read", "traces.make.contest",
}  # fmt: skip


def run_code(code: str, *words: str) -> list[str]:
    """Run code in a fresh interpreter; return the words of its last line."""
    command = [sys.executable, "-Ic", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the modules that a run of ten requests has loaded."""
    file = tmp_path_factory.mktemp("start") / "ten.yaml"
    file.write_text(SCENARIO)
    return set(run_code(RUN, str(file)))


def test_a_run_of_ten_requests_loads_no_library_of_reports_and_studies(loaded: set[str]) -> None:
    assert "numpy" in loaded and not SLOW & loaded


def test_a_run_loads_the_engine_that_it_simulates_and_no_other(loaded: set[str]) -> None:
    assert {family for family in FAMILIES if f"servesim.policies.{family}" in loaded} == {"vllm_v1"}
    projects = {kind.__module__ for kind in ROUTERS.values()} - {"servesim.routers.simple"}
    assert len(projects) > 5 and not projects & loaded


def test_a_run_loads_no_part_for_what_its_scenario_does_not_have(loaded: set[str]) -> None:
    assert not {part for part in UNUSED if f"servesim.{part}" in loaded}


def test_a_run_builds_the_models_of_its_own_arrivals_and_lengths_only() -> None:
    code = "import sys, json; from servesim.traces.make import arrivals, lengths, workload"
    code += "; workload.workload_from(json.loads(sys.argv[1]))"
    code += "; kinds = {**arrivals.ARRIVAL_KINDS, **lengths.DISTRIBUTION_KINDS, **lengths.PAIR_KINDS}"
    code += "; print(*(name for name, kind in kinds.items() if kind.__pydantic_complete__))"
    section = {
        "requests": 10,
        "arrivals": {"kind": "poisson", "rate": 5},
        "lengths": {"kind": "lognormal", "prompt": {"mean": 9, "sd": 1}, "output": 3},
    }
    assert set(run_code(code, json.dumps(section))) == {"poisson", "lognormal", "fixed"}


@pytest.mark.parametrize(("table", "base"), [(POLICIES, Policy), (ROUTERS, Router)])
def test_a_table_has_its_names_before_their_classes_are_imported(table: Any, base: type[Any]) -> None:
    package = "policies" if base is Policy else "routers"
    code = f"import sys; from servesim.{package} import {package.upper()} as table; bare = set(sys.modules)"
    code += "; print(*table); assert bare == set(sys.modules)"
    assert run_code(code) == [*table]
    for name, kind in table.items():
        assert issubclass(kind, base) and table.name_of(kind) == name
    assert table.name_of(base) is None and "no such name" not in table


def test_a_command_builds_the_parser_of_its_group_only() -> None:
    code = "import sys; from servesim.cli import main; main(['models']); print(*sys.modules)"
    parsers = {name for name in run_code(code) if name.startswith("servesim.commands.")}
    assert parsers == {"servesim.commands.models", "servesim.commands.options", "servesim.commands.notes"}


def test_a_command_of_this_process_does_not_change_its_garbage_collection() -> None:
    before = gc.get_threshold()
    assert main(["models", "-q"]) == 0
    assert gc.get_threshold() == before


@pytest.mark.parametrize("name", bundled_profiles())
def test_the_bundled_profiles_are_valid(name: str) -> None:
    """A command does not check them again."""
    path = bundled_profiles()[name] / "profile.yaml"
    check_file(read_yaml(path), str(path))


def test_the_folder_of_bundled_profiles_is_read_once() -> None:
    assert bundled_profiles() is bundled_profiles()
