"""Help pages fit the terminal, and say the same in a pipe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from servesim.cli import Parser, parser
from servesim.commands.options import leaf_commands
from servesim.commands.sweep import CAPACITY_KEYS, SEARCH_KEYS, SWEEP_KEYS
from servesim.files.terminal import two_columns
from servesim.study.study_keys import CapacityKeys, SearchFile, SweepFile


def groups(of: Parser) -> Iterator[Parser]:
    """Yield the parsers that have subcommands."""
    if of.commands is not None:
        yield of
        for inner in of.commands.choices.values():
            yield from groups(inner)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_of_commands_fit(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {group.prog: group.format_help().split() for group in groups(parser())}
    monkeypatch.setenv("COLUMNS", str(columns))
    pages = {group.prog: group.format_help() for group in groups(parser())}
    assert set(pages) > {"sim", "sim calibrate", "sim trace", "sim policies"}
    for name, page in pages.items():
        assert max(map(len, page.splitlines())) <= columns, name
        assert page.split() == wide[name]  # only the line breaks differ


def test_a_pipe_has_one_line_per_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert two_columns({"a": "word " * 100, "bcd": "x"}) == f"  a    {('word ' * 100).strip()}\n  bcd  x"


def test_every_argument_has_a_help_text() -> None:
    arguments = [(command.prog, action) for command in leaf_commands(parser()) for action in command._actions]
    assert not [(prog, action.dest) for prog, action in arguments if not action.help]


@pytest.mark.parametrize(
    ("command", "model", "keys"),
    [
        ("sim sweep", SweepFile, SWEEP_KEYS),
        ("sim search", SearchFile, SEARCH_KEYS),
        ("sim capacity", CapacityKeys, CAPACITY_KEYS),
    ],
)
def test_options_that_are_keys_of_a_file_have_its_words(command: str, model: type[SweepFile], keys: list[str]) -> None:
    found = {inner.prog: inner for inner in leaf_commands(parser())}[command]
    actions = {action.dest: action for action in found._actions}
    for key in keys:
        assert actions[key].help.replace("%%", "%").startswith(model.model_fields[key].description), key
        default = model.model_fields[key].default
        assert ("(default: " in actions[key].help) == bool(default), key


def test_the_list_of_commands_imports_no_models() -> None:
    code = "import sys; from servesim.cli import parser; parser().format_help(); assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
