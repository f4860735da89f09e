"""What commands print: tests/expected/commands has command lines with their output and exit code.

`pytest tests/test_expected.py --renew` writes the files again; review them as a diff. A line `$ cat > FILE` and the
lines up to EOF write a file. Every error must be one printable line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from .commands.running import run_sim
from .conftest import EXPECTED

FOLDER = EXPECTED / "commands"


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each line that starts with `$`, `#` or nothing, and the lines that follow it."""
    lines = text.splitlines()
    while lines:
        first, rest = lines.pop(0), list[str]()
        if first.startswith("$ "):
            is_file = first.startswith("$ cat > ")
            while lines and (not lines[0].startswith("$ ") if not is_file else rest[-1:] != ["EOF"]):
                rest.append(lines.pop(0))
        yield first, rest


def answer(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what a command prints, and its exit code if it is not 0. Bad input is one line, and leaves no file."""
    before = sorted(folder.rglob("*"))
    said = run_sim(capsys, *words)
    if said.code == 2 and not said.error.startswith("usage: "):
        assert said.error.count("\n") == 1 and said.error[:-1].isprintable(), said.error
        assert sorted(folder.rglob("*")) == before, words
    lines = (said.out + said.error).replace(str(folder), "FOLDER").splitlines()
    return [*lines, *([f"exit code {said.code}"] if said.code else [])]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_commands_print_what_the_file_says(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    expected = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    found: list[str] = []
    for first, rest in blocks(expected):
        found.append(first)
        if first.startswith("$ cat > "):
            file = tmp_path / first.removeprefix("$ cat > ").removesuffix(" <<EOF")
            file.write_text("\n".join([*rest[:-1], ""]), encoding="utf-8")
            found += rest
        elif first.startswith("$ sim"):
            found += [*answer(shlex.split(first)[2:], tmp_path, capsys), *rest[len(rest) - trailing(rest) :]]
    text = "\n".join([*found, ""])
    if request.config.getoption("--renew"):
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
    assert text == expected or request.config.getoption("--renew")


def trailing(lines: list[str]) -> int:
    """Return how many lines at the end are empty or comments: they separate commands."""
    count = 0
    while count < len(lines) and (not lines[-1 - count] or lines[-1 - count].startswith("# ")):
        count += 1
    return count
