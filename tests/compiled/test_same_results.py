"""Compiled and plain runs write the same bytes: results, requests, decisions, timelines and queue lengths.

In each of them, fast-forward changes nothing, and the states of every request add up.
"""

from __future__ import annotations

from pathlib import Path

from servesim.config.registry import presets
from servesim.policies import POLICIES

from ..random_scenarios import COUNT
from .children import first_difference, run_both


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


def check_coverage(lines: list[str]) -> None:
    """Check that the scenarios are not all alike: every policy finishes requests, and every outcome occurs."""
    assert len(lines) == COUNT + len(presets())
    for policy in POLICIES:
        assert any(f"-{policy} " in line and '"finished"' in line for line in lines), policy
    for text in ("refused", "failed", "lost", "unanswered", "stuck at", "error:"):
        assert sum(text in line for line in lines) >= 10, text
    assert sum("error:" in line for line in lines) < COUNT / 10
    assert sum('"preemptions": 0' not in line for line in lines) > COUNT / 10
    assert not [line for line in lines if "fault:" in line]


def test_presets_and_random_scenarios_write_the_same_bytes(plain: Path, tmp_path: Path) -> None:
    compiled, in_plain = run_both(plain, "run_scenarios", tmp_path)
    check_coverage(in_plain)
    different = [line.split()[0] for line, other in zip(compiled, in_plain) if line != other]
    if different:
        raise AssertionError(
            f"{len(different)} scenarios differ: {', '.join(different[:20])}\n"
            + explain(plain, tmp_path / "again", different[0])
        )
    assert len(compiled) == len(in_plain)
