"""Help pages fit the terminal, and say the same in a pipe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servesim.cli import Parser, parser
from servesim.commands.options import leaf_commands
from servesim.files.terminal import two_columns


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
