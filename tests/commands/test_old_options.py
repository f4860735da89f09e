"""Old names of options: they still work, and no help text shows them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from servesim.cli import main, parser

PROBE = ["calibrate", "probe", "--backend", "fake", "-o", "x"]
ENDPOINT = ["calibrate", "endpoint", "--url", "u", "--api", "openai", "-o", "x"]
OLD_OPTIONS = [  # command, old option, new option, value
    (["run"], "--no-leaps", "--no-fast-forward", None),
    (PROBE, "--blocks", "--num-blocks", "77"),
    (PROBE, "--most-rows", "--max-rows", "7"),
    (PROBE, "--most-tokens", "--max-tokens", "77"),
    (PROBE, "--longest", "--max-seq-len", "77"),
    (ENDPOINT, "--most-tokens", "--max-tokens", "77"),
    (ENDPOINT, "--salt", "--prompt-seed", "a"),
    (["calibrate", "logs", "runs.yaml"], "--no-leave-out", "--no-cross-validation", None),
    (["trace", "synth"], "--dispatch", "--send-overhead", "0.5"),
    (["trace", "inspect", "t.csv"], "--picture", "--plot", "p.png"),
    (["serve", "--backend", "fake"], "--queue", "--max-open-requests", "3"),
]


@pytest.mark.parametrize(("command", "old", "new", "value"), OLD_OPTIONS)
def test_the_old_name_of_an_option_works_and_is_not_shown(
    capsys: pytest.CaptureFixture[str], command: list[str], old: str, new: str, value: str | None
) -> None:
    values = [] if value is None else [value]
    by_old, by_new, without = (
        vars(parser().parse_args([*command, *more])) for more in ([old, *values], [new, *values], [])
    )
    assert by_old == by_new != without
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = capsys.readouterr().out
    assert new in shown and f"{old} " not in shown and f"{old}\n" not in shown


def commands(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield every command that can be run."""
    inner = next((action for action in top._actions if isinstance(action, argparse._SubParsersAction)), None)
    if inner is None:
        yield top
    for command in inner.choices.values() if inner else ():
        yield from commands(command)


def test_every_argument_has_a_help_text() -> None:
    arguments = [(command.prog, action) for command in commands(parser()) for action in command._actions]
    assert not [(prog, action.dest) for prog, action in arguments if not action.help]
