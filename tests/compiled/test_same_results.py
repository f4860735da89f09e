"""Compiled and plain Python write the same bytes and print the same texts: runs, help and one-line errors.

In each run, observers change nothing, and the states of every request add up.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from servesim.config.registry import presets
from servesim.policies import POLICIES

from ..random_scenarios import COUNT, numbers
from .children import first_difference, run_both
from .print_texts import BAD_CLASSES, BAD_SETTINGS


def explain(plain: Path, folder: Path, name: str) -> str:
    """Run one scenario again and return the first line that differs between its files."""
    compiled, in_plain = run_both(plain, "run_scenarios", folder, [name])
    for path in sorted((folder / "compiled" / name).rglob("*")):
        other = folder / "plain" / path.relative_to(folder / "compiled")
        if path.is_file() and path.name != "manifest.json":
            text = other.read_text(encoding="utf-8") if other.exists() else ""
            if text != path.read_text(encoding="utf-8"):
                return f"{name}: {path.name}: {first_difference(path.read_text(encoding='utf-8'), text)}"
    return f"{name}: {first_difference(compiled[0], in_plain[0])}"


def check_coverage(lines: list[str], count: int) -> None:
    """Check that the scenarios are not all alike: every policy finishes requests, and every outcome occurs."""
    assert len(lines) == len(numbers(count)) + len(presets())
    for policy in POLICIES:
        assert any(f"-{policy} " in line and '"finished"' in line for line in lines), policy
    for text in ("refused", "failed", "lost", "unanswered", "stuck at", "error:"):
        assert sum(text in line for line in lines) >= count // 250, text
    assert sum("error:" in line for line in lines) < count / 10
    assert sum('"preemptions": 0' not in line for line in lines) > count / 10
    assert not [line for line in lines if "fault:" in line]


@pytest.mark.parametrize("count", [COUNT // 5, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_presets_and_random_scenarios_write_the_same_bytes(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("SCENARIOS", str(count))
    compiled, in_plain = run_both(plain, "run_scenarios", tmp_path)
    check_coverage(in_plain, count)
    different = [line.split()[0] for line, other in zip(compiled, in_plain) if line != other]
    if different:
        raise AssertionError(
            f"{len(different)} scenarios differ: {', '.join(different[:20])}\n"
            + explain(plain, tmp_path / "again", different[0])
        )
    assert len(compiled) == len(in_plain)


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
