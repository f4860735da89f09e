"""The adapter as a process: with a script of the server, from an installation and from a copy, and with bad usage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ...conftest import ROOT

MODULE = "servesim.calibrate.adapter"
LOG_LEVEL_OF_THE_SERVER = "import logging\nlogging.basicConfig(level=logging.ERROR)\n"


def write_server(folder: Path) -> Path:
    """Write a package with the names of llm-serving, and a script that schedules once and prints its arguments."""
    for name, kind, function in (
        ("schedule", "Schedule", "_continuous_batch_pa"),
        ("master", "AsyncMaster", "_check_prompt_predict_data_pa"),
    ):
        package = folder / "mindspore_serving" / name
        package.mkdir(parents=True)
        (package / f"{name}.py").write_text(f"class {kind}:\n    def {function}(self): pass\n")
    (folder / "worker.py").write_text("NAME = 'a module of the server'\n")  # servesim has one of this name too
    script = folder / "server_app_post.py"
    script.write_text(
        LOG_LEVEL_OF_THE_SERVER + "import sys\nimport worker\nworker.NAME\n"
        "from mindspore_serving.schedule.schedule import Schedule\n"
        "print(Schedule._continuous_batch_pa.__module__, sys.argv[1:], __name__)\n"
        "class Started(Exception): pass\n"
        "def start(self): raise Started\n"
        "schedule = Schedule()\nschedule.batch_size = 3\nSchedule.try_initialize_paddings_pa = start\n"
        "try:\n    schedule._continuous_batch_pa()\nexcept Started:\n    print('called')\n"
    )
    return script


def start_server(
    command: list[str], folder: Path, *more_path: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *more_path])
    environment = {**os.environ, "PYTHONPATH": path, "SERVESIM_POLICY": '{"delay_factor": 0.5}', **variables}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)


def check_started(done: subprocess.CompletedProcess[str]) -> None:
    lines = done.stdout.splitlines()
    assert lines[:1] == ["servesim.calibrate.adapter.llm_serving ['--config', 'x.yaml'] __main__"], done.stderr
    assert lines[1:] == ["called"]
    assert done.stderr.startswith("servesim now schedules 3 slots: LLMServing(")  # also if the server logs errors only
    assert done.returncode == 0


def test_adapter_module_installs_a_policy_in_the_server_process(tmp_path: Path) -> None:
    script = write_server(tmp_path)
    check_started(start_server([sys.executable, "-m", MODULE, str(script), "--config", "x.yaml"], tmp_path))


def interpreters() -> list[str]:
    """Return this interpreter and, if installed, a Python 3.9 as on the hosts of llm-serving."""
    old = [shutil.which("python3.9"), *map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python"))]
    return [sys.executable, *[python for python in old if python and runs(python)][:1]]


def runs(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, timeout=600).returncode == 0


@pytest.mark.parametrize("python", interpreters(), ids=lambda python: Path(python).name)
def test_adapter_and_live_driver_need_only_the_standard_library(python: str) -> None:
    code = """
import sys
sys.path.insert(0, "calibrate/device")
import worker
sys.path.pop(0)
sys.meta_path.insert(0, worker.PackageFinder(ROOT + "/calibrate/device"))
import servesim.calibrate.adapter.llm_serving
import servesim.calibrate.live.replay_job
import servesim.calibrate.server.engine_process
foreign = {"numpy", "simpy", "yaml", "pydantic", "pandas", "aiohttp"} & set(sys.modules)
assert not foreign, foreign
"""
    command = [python, "-I", "-S", "-c", code.replace("ROOT", repr(str(ROOT)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("python", interpreters(), ids=lambda python: Path(python).name)
def test_adapter_runs_from_a_copy_of_three_folders(tmp_path: Path, python: str) -> None:
    copy = tmp_path / "copy"
    for name in ("sim", "policies", "calibrate"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    server = tmp_path / "server"
    server.mkdir()
    command = [python, "-S", str(copy / "calibrate" / "adapter"), str(write_server(server)), "--config", "x.yaml"]
    check_started(start_server(command, server))


@pytest.mark.parametrize("python", interpreters(), ids=lambda python: Path(python).name)
def test_adapter_runs_from_an_installation_without_dependencies(tmp_path: Path, python: str) -> None:
    installed = tmp_path / "site" / "servesim"
    for source, target in (("sim", "."), ("policies", "policies"), ("calibrate", "calibrate"), ("traces", "traces")):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / source, installed / target, dirs_exist_ok=True, ignore=ignored)
    server = tmp_path / "server"
    server.mkdir()
    command = [python, "-S", "-m", MODULE, str(write_server(server)), "--config", "x.yaml"]
    check_started(start_server(command, server, str(installed.parent)))
