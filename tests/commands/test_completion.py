"""Completion scripts work in real shells: commands, options, choices, names and files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .running import run_sim

pytest.importorskip("shtab", reason="needs shtab")
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _shtab_sim; printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C "$argv[2]"'
ZSH = """
autoload -Uz compinit && compinit -u -d "$2"
eval "$(cat "$1")"
whence -w _shtab_sim; print -r -- ${_comps[sim]}
"""
CASES = {
    "sim sw": "sweep",
    "sim calibrate pr": "probe",
    "sim run --pres": "--preset",
    "sim run --preset vllm-v1": "vllm-v1-0.32",
    "sim run --policy sarat": "sarathi",
    "sim run --profile ascend": "ascend910b4-llama2-7b",
    "sim policies sh": "show",
    "sim policies show sarat": "sarathi",
    "sim policies show vllm-v1-": "vllm-v1-0.32",
    "sim policies check spl": "splitfuse",
    "sim calibrate check cpu": "cpu-tiny-kbk",
    "sim export --to ll": "llm-serving",
    "sim run --trace my_": "my_trace.csv",
    "sim completion z": "zsh",
}


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a folder with the scripts of all shells, and a trace."""
    for shell in ("bash", "zsh", "fish"):
        said = run_sim(capsys, "completion", shell)
        assert (said.code, said.error) == (0, "")
        (tmp_path / shell).write_text(said.out)
    (tmp_path / "my_trace.csv").write_text("arrival,prompt,output\n")
    return tmp_path


def shell(name: str, *words: str, folder: Path) -> str:
    """Return what a shell prints; skip the test if it is not installed."""
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    options = {"bash": ["--norc"], "fish": ["--no-config"], "zsh": ["-f"]}[name]
    done = subprocess.run([name, *options, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_bash_completes(scripts: Path) -> None:
    for line, expected in CASES.items():
        found = shell("bash", "-c", BASH, "bash", str(scripts / "bash"), *line.split(), folder=scripts).split()
        assert expected in found, f"{line}: {found}"


def test_fish_completes(scripts: Path) -> None:
    for line, expected in CASES.items():
        found = shell("fish", "-c", FISH, str(scripts / "fish"), line, folder=scripts)
        assert expected in [text.split("\t")[0] for text in found.splitlines()], f"{line}: {found}"


def test_zsh_loads_the_script(scripts: Path) -> None:
    shown = shell("zsh", "-c", ZSH, "zsh", str(scripts / "zsh"), str(scripts / "dump"), folder=scripts)
    assert shown.split() == ["_shtab_sim:", "function", "_shtab_sim"]
