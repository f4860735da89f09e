"""Wheels: compiled or plain Python, the reason that `sim --version` shows, and builds that must fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from servesim import version
from servesim.cli import main

from .conftest import ROOT
from .layers import modules


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that a wheel needs; it compiles one package only, which takes less time."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("sim", "policies", "routers", "calibrate", "traces"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    text, count = re.subn(r"^COMPILED = .*", 'COMPILED = ("core/*",)', (folder / "setup.py").read_text(), flags=re.M)
    assert count == 1
    (folder / "setup.py").write_text(text)
    return folder


def build(tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel into `dist` with these environment variables."""
    for folder in ("dist", "build"):
        shutil.rmtree(tree / folder, ignore_errors=True)
    environment = {**os.environ, "SERVESIM_COMPILE": "", "SERVESIM_PURE": "", **variables}
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)


def plain_note(tree: Path) -> str:
    """Return the note of the wheel, which must have no compiled module."""
    (wheel,) = (tree / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".pyd", ".c"))]
        files = [*modules(ROOT).values(), *ROOT.glob("policies/*/presets/*.yaml"), *ROOT.glob("traces/examples/*.json")]
        needed = {f"servesim/{path.relative_to(ROOT).as_posix().removeprefix('sim/')}" for path in files}
        assert needed <= set(archive.namelist())
        return archive.read("servesim/plain.txt").decode().strip()


@pytest.mark.slow
def test_a_wheel_without_compiled_modules_runs_on_every_platform(tree: Path) -> None:
    assert build(tree, SERVESIM_PURE="1").returncode == 0
    assert [path.name for path in (tree / "dist").iterdir()] == ["servesim-0.4.0-py3-none-any.whl"]
    assert plain_note(tree) == "SERVESIM_PURE was set"


def test_make_demo_compiles_if_it_can_and_ends_with_the_next_command(tmp_path: Path) -> None:
    """Without a compiler it also works: setup.py then installs plain Python."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    command = ["make", "-n", "--no-print-directory", "demo", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "tools/install.sh" in done.stdout and "SERVESIM_PURE" not in done.stdout
    assert "sim recommend --model llama-3.1-8b --device H100" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_without_a_c_compiler_the_wheel_is_plain_python_and_runs_in_an_empty_environment(
    tree: Path, tmp_path: Path
) -> None:
    """Empty but for the libraries that servesim needs, which are those of the tests."""
    assert build(tree, CC="no-such-compiler").returncode == 0
    assert plain_note(tree) == "no C compiler found"
    venv.create(tmp_path, with_pip=False)
    [packages] = (tmp_path / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    [wheel] = (tree / "dist").iterdir()
    programs = {**os.environ, "PATH": str(tmp_path / "bin")}  # so that no compiler is found
    programs.pop("PYTHONPATH", None)
    install = [tmp_path / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", wheel]
    subprocess.run(install, cwd=tmp_path, env=programs, check=True, timeout=600)
    run = "run --preset contest-baseline -X 5 --quiet"
    for words, printed in ("--version", "(plain Python: no C compiler found)"), (run, "Successful requests"):
        command = ["sim", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, env=programs, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and printed in done.stdout, done.stderr


def test_missing_python_headers_are_the_reason_not_to_compile() -> None:
    code = "import runpy, setuptools, sysconfig; sysconfig.get_path = lambda name: '/'; runpy.run_path('setup.py')"
    environment = {**os.environ, "SERVESIM_COMPILE": "1", "SERVESIM_PURE": "", "CC": sys.executable}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    reason = "the Python headers are missing: apt install python3-dev"
    assert done.stderr == f"SERVESIM_COMPILE is set, but servesim cannot be compiled: {reason}\n"


@pytest.mark.slow
def test_a_failed_build_is_reported(tree: Path) -> None:
    done = build(tree, CC="false")
    assert done.returncode == 0, done.stderr
    assert "servesim is not compiled: CompileError" in done.stderr
    assert plain_note(tree) == "the build failed; SERVESIM_COMPILE=1 pip install . shows the error"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_build_that_was_asked_for_may_not_fall_back(tree: Path, compiler: str) -> None:
    done = build(tree, CC=compiler, SERVESIM_COMPILE="1")
    assert done.returncode != 0
    assert not (tree / "dist").exists()


@pytest.mark.slow
def test_mypy_finds_the_editable_installation_of_contributing(tree: Path, tmp_path: Path) -> None:
    """It does not find the modules of setuptools' default, which an import hook loads."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [options] = re.findall(r"^pip install -c constraints\.txt -e '\.\[.+\]'(.*)$", contributing, re.MULTILINE)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    tree = shutil.copytree(tree, tmp_path / "tree")
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")  # pip, setuptools, mypy and libraries
    environment = {key: text for key, text in os.environ.items() if key not in ("PYTHONPATH", "MYPYPATH")}
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-warn-script-location"]
    subprocess.run([*install, "-e", ".", *options.split()], cwd=tree, env=environment, check=True, timeout=600)
    (tree / "sim" / "core" / "plan.py").write_text("wrong: int = ''\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--cache-dir", os.devnull]
    done = subprocess.run(
        [*mypy, "-p", "servesim.core.plan"], cwd=tree, env=environment, capture_output=True, text=True, timeout=600
    )
    assert "core/plan.py:1: error: Incompatible types in assignment" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("python", "constraints", "line"),
    [("3.10", "constraints.txt", ""), ("3.13", "constraints.txt", ""), ("3.14", "", "Python 3.14 was not tested: pip")],
)
def test_make_installs_tested_versions_or_says_that_it_does_not(
    tmp_path: Path, python: str, constraints: str, line: str
) -> None:
    """Also in the environment of the build: pip reads one of the variables there, which one depends on its version."""
    (tmp_path / "bin").mkdir()
    programs = {
        "python": f"echo {python}",
        "sim": "echo servesim",
        "pip": 'echo "<$PIP_CONSTRAINT><$PIP_BUILD_CONSTRAINT> $*"',
    }
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    command = ["/bin/bash", str(ROOT / "tools" / "install.sh"), sys.executable, str(tmp_path), "numpy"]
    environment = {key: text for key, text in os.environ.items() if not key.startswith("PIP_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert f"<{constraints}><{constraints}> install" in done.stdout
    assert [text[: len(line)] for text in done.stdout.splitlines() if "not tested" in text] == ([line] if line else [])


def test_make_names_a_missing_venv_in_one_line(tmp_path: Path) -> None:
    """Debian has it in a package of its own."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$2" in *venv*) exit 1 ;; esac\n')
    python.chmod(0o755)
    command = ["/bin/bash", str(ROOT / "tools" / "install.sh"), str(python), str(tmp_path / "new"), "numpy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"{python} has no venv: apt install python3-venv\n"


def test_the_workflow_builds_a_compiled_wheel_for_every_tested_python() -> None:
    project, workflow = (ROOT / "pyproject.toml").read_text("utf-8"), ROOT / ".github" / "workflows" / "wheels.yml"
    section = project.partition("[tool.cibuildwheel]")[2]
    versions = re.findall(r"Python :: 3\.(\d+)", (ROOT / "setup.cfg").read_text("utf-8"))
    assert re.findall(r'"cp3(\d+)-\*"', section) == versions
    assert 'SERVESIM_COMPILE = "1"' in section and "is_compiled()" in section
    machines = yaml.safe_load(workflow.read_text("utf-8"))["jobs"]["compiled"]["strategy"]["matrix"]["os"]
    assert {name.partition("-")[0] for name in machines} == {"ubuntu", "macos"} and "ubuntu-24.04-arm" in machines


def test_the_modules_that_are_compiled_for_speed_exist() -> None:
    """setup.py would silently compile a renamed one like a module that is rarely used."""
    [names] = re.findall(r"^OFTEN_CALLED = \((.*?)\)", (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    paths = {path.relative_to(ROOT).as_posix().removeprefix("sim/") for path in modules(ROOT).values()}
    assert {f"{name}.py" for name in re.findall(r'"(.+?)"', names)} <= paths


def test_this_installation_is_compiled_if_the_tests_ask_for_it() -> None:
    assert version.is_compiled() or not os.environ.get("SERVESIM_COMPILE")


def test_version_names_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    kind = "compiled" if version.is_compiled() else "plain Python"
    assert capsys.readouterr().out.startswith(f"servesim 0.4.0 ({kind}")


def test_the_installed_command_starts() -> None:
    """Other tests run the function of the command."""
    command = [Path(sys.executable).parent / "sim", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{version.describe()}\n"


def test_version_of_a_plain_installation_has_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "PACKAGE", tmp_path)
    assert version.describe() == "servesim 0.4.0 (plain Python)"
    (tmp_path / "plain.txt").write_text("no C compiler found\n")
    assert version.describe() == "servesim 0.4.0 (plain Python: no C compiler found)"
