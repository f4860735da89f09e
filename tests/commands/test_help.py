"""Help pages fit the terminal, and say the same in a pipe."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from servesim.cli import TASKS, Parser, main, parser
from servesim.commands.options import leaf_commands
from servesim.commands.sweep import CAPACITY_KEYS, SEARCH_KEYS, SWEEP_KEYS
from servesim.files.terminal import two_columns
from servesim.study.study_keys import CapacityKeys, SearchFile, SweepFile

from .running import run_sim


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


@pytest.mark.parametrize("columns", ["60", "100", ""])
def test_the_common_tasks_fit(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    said = run_sim(capsys)
    assert (said.code, said.error) == (0, "")
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= int(columns or 10_000)
    for command in TASKS:
        assert sum(line.startswith(f"  {command}") for line in lines) == 1  # a command can be copied in one piece


def test_a_pipe_has_one_line_per_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert two_columns({"a": "word " * 100, "bcd": "x"}) == f"  a    {('word ' * 100).strip()}\n  bcd  x"


def test_names_of_policies_stay_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["policies", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.split()[:2] == ["policy", "sarathi-alternating"] for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nope"], "sim: expected a command, got --nope; see sim --help"),
        (["trace", "-x"], "sim trace: expected a command, got -x; see sim trace --help"),
        (["run", "-"], "sim: -: expected a scenario file; only a trace is read from standard input, with --trace -"),
        (
            ["run", "a.csv.gz"],
            "sim: a.csv.gz: expected a scenario file (YAML), not a trace; for a trace use --trace a.csv.gz",
        ),
        (
            ["sweep", "a.JSONL"],
            "sim: a.JSONL: expected a sweep file (YAML), not a trace; for a trace use --trace a.JSONL",
        ),
    ],
)
def test_first_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_sim(capsys, *words)
    assert (said.code, said.out, said.error) == (2, "", message + "\n")


def test_every_argument_has_a_help_text() -> None:
    arguments = [(command.prog, action) for command in leaf_commands(parser()) for action in command._actions]
    assert not [(prog, action.dest) for prog, action in arguments if not action.help]


def test_a_user_of_vllm_does_not_meet_the_contest_first() -> None:
    """The options of the contest are the last group; examples have settings of vLLM."""
    commands = list(leaf_commands(parser()))
    with_contest = [command for command in commands if "-X" in command._option_string_actions]
    assert {command.prog for command in with_contest} == {"sim run", "sim replay", "sim serve", "sim trace synth"}
    for command in commands:
        before, _, contest = command.format_help().partition("\nllm-serving contest of 2024:\n")
        assert bool(contest) == (command in with_contest), command.prog
        assert not re.search(r"^  -[XT] ", before, re.MULTILINE), command.prog
        assert not re.search(r"^\S", contest, re.MULTILINE), f"{command.prog}: the contest is the last group"
        assert "decode_batch" not in before
    assert not [task for task in TASKS if "-X" in task or "decode_batch" in task]
    assert not re.search(r"-X|decode_batch|contest", parser().format_help())


def test_every_command_describes_json_with_the_same_words() -> None:
    texts = {action.help for command in leaf_commands(parser()) for action in command._actions if action.dest == "json"}
    assert texts == {"print the result as JSON instead of text"}


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
