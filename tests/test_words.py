"""Names and texts use the house vocabulary: no metaphors as names, no words that hide the actor."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import ROOT


def load_tool() -> ModuleType:
    """Load tools/words.py; tools are not part of the package."""
    spec = importlib.util.spec_from_file_location("words", ROOT / "tools" / "words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["words"] = module
    spec.loader.exec_module(module)
    return module


words = load_tool()


def test_no_forbidden_word_in_the_repository() -> None:
    assert [str(hit) for hit in words.find_hits(words.text_files())] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class FrontDesk:", ["FrontDesk"]),
        ("def gpu_stories() -> None:", ["gpu_stories"]),
        ("A SITTING, two stages and DesksOfAll.", ["SITTING", "stages", "DesksOfAll"]),
        ("class Counter:", ["Counter"]),
        ("from collections import Counter, deque\nfound = Counter()", []),
        ("a counter of the timeline", []),
        ("self._let_go(request)", ["_let_go"]),
        ("outlive_nobody()", ["outlive_nobody", "nobody"]),
        ("def test_whoever_waits() -> None: ...", ["whoever"]),
        ("# the first so\n    # many requests", ["so # many"]),
        ("It is told\nAnew; NOBODYS blocks, somebody's", ["is told", "Anew", "NOBODYS", "somebody"]),
        ("storage, staged, history, destination, also many, this told, renewed, allowed", []),
        ("SARATHI(chunk_schedule_stages=4)", []),
    ],
)
def test_the_scan_finds_words_and_parts_of_names(text: str, expected: list[str]) -> None:
    assert [word for _, word in sorted(words.scan(text))] == expected


def test_old_identifiers_are_allowed_in_the_changelog_only() -> None:
    text = "`Desk` is now `EngineLoop`"
    assert list(words.scan(text, "CHANGELOG.md")) == []
    assert [word for _, word in words.scan(text, "README.md")] == ["Desk"]


def test_stages_are_allowed_in_files_about_engines_that_have_stages() -> None:
    assert list(words.scan("the first stage", "policies/papers/sarathi.py")) == []
    assert [word for _, word in words.scan("the first stage; class Stage", "policies/orca.py")] == ["stage", "Stage"]


def test_hits_have_file_and_line_and_recordings_are_exempt(tmp_path: Path) -> None:
    (tmp_path / "tests" / "recordings").mkdir(parents=True)
    for name in ("page.md", "tests/recordings/README.md"):
        (tmp_path / name).write_text("first line\nread it aloud\n", encoding="utf-8")
    (tmp_path / "data.csv").write_text("aloud", encoding="utf-8")
    assert [str(hit) for hit in words.find_hits(words.text_files(tmp_path), tmp_path)] == ["page.md:2: aloud"]
