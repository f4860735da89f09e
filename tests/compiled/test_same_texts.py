"""Compiled and plain commands print the same texts: help of policies and presets, results, and one-line errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from .children import first_difference, run_both
from .print_texts import BAD_CLASSES, BAD_SETTINGS


@pytest.fixture(scope="module")
def texts(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    return run_both(plain, "print_texts", tmp_path_factory.mktemp("texts"))


def test_commands_print_the_same_texts(texts: tuple[list[str], list[str]]) -> None:
    compiled, in_plain = texts
    assert compiled == in_plain, first_difference("\n".join(compiled), "\n".join(in_plain))


def test_help_results_and_errors_are_as_expected(texts: tuple[list[str], list[str]]) -> None:
    """Two equal texts could both be wrong: help is there, good policies run, and every error is one line."""
    text = "\n".join(texts[0])
    assert "maximum running requests" in text and "FillBatch: Fill the batch in the order of the waiting queue." in text
    for block in text.split("$ sim ")[1:]:
        command, _, output = block.partition("\n")
        fails = command.startswith("run") and any(f":{name} " in command for name in BAD_CLASSES)
        wrong = any(f" {setting} ->" in command for setting in BAD_SETTINGS)
        assert command.endswith(f"-> {1 if fails else 2 if wrong else 0}"), block[:500]
        if fails or wrong:
            assert output.startswith("sim: ") and output.strip().count("\n") == 0, block[:1000]
