"""README and docs: every command in them runs and prints what they say, every link leads somewhere."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from servesim.cli import parser
from servesim.policies import POLICIES

from ..conftest import ROOT


def tool(name: str) -> ModuleType:
    """Load one of the tools, which are no part of the package."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


pages, reference = tool("pages"), tool("reference")
PAGES = pages.pages()
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
INLINE = re.compile(r"(?<!`)`((?:sim|python -m servesim) [^`\n]+)`(?!`)")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return str(pages.FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    pages.prepare(tmp_path)
    for block in pages.blocks(page.read_text(encoding="utf-8")):
        for said, printed in pages.play(block, tmp_path):
            assert said.printed == printed, f"{named(page)}:{block.line}: {said.command}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_a_page_takes_from_the_program_is_what_the_program_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert reference.filled(text) == text, "python tools/reference.py writes it anew"


def test_the_commands_are_those_of_the_parser() -> None:
    written = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == reference.reference(), "python tools/reference.py writes it anew"


@pytest.mark.parametrize("name", ["my_policy.py", "my_sweep.yaml"])
def test_an_example_that_is_shown_is_the_file(name: str) -> None:
    file = (ROOT / "examples" / name).read_text(encoding="utf-8")
    blocks = [block for page in PAGES for block in pages.blocks(page.read_text(encoding="utf-8"))]
    shown = [block.text for block in blocks if block.name == name]
    assert shown
    assert set(shown) == {file}
    assert sum(bool(line.strip()) for line in file.splitlines()) <= 20


def test_the_readme_names_every_policy_that_was_not_proven() -> None:
    limits = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Limits")[2]
    for name, kind in POLICIES.items():
        if kind().traits.validated_against.startswith("not proven"):
            assert f"`{name}`" in limits


def test_what_is_not_run_is_at_least_known() -> None:
    """Blocks of sh need hardware or long: their `sim` commands must be ones that the parser takes."""
    seen = 0
    for page in PAGES:
        for block in pages.blocks(page.read_text(encoding="utf-8")):
            if block.language != "sh":
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                seen += known(line, f"{named(page)}:{block.line}")
    assert seen


def known(line: str, where: str) -> bool:
    """Parse a command of ours; others must be of a kind that is expected here."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words:
        return False
    if words[0] == "sim":
        quiet(words[1:], where)
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{where}: no target {words[1]}"
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file() or words[1].startswith("examples/server"), f"{where}: no {words[1]}"
    else:
        assert words[0] in OTHERS, f"{where}: {line}"
    return True


OTHERS = (
    ".",
    "pip",
    "python",
    "export",
    "curl",
    "pytest",
    "ssh",
    "scp",
    "cd",
    "git",
    "dask",
    "jupyter",
    "jupytext",
    ".venv/bin/python",
)


def quiet(words: list[str], where: str) -> None:
    """Parse a command line; a complaint is a failure that says where."""
    words = words[: words.index(">")] if ">" in words else words
    words = [word for word in words if word != "&"]
    try:
        parser().parse_args(words)
    except SystemExit as stop:
        if stop.code:
            pytest.fail(f"{where}: sim {' '.join(words)}")


def test_commands_named_in_passing_exist() -> None:
    for page in PAGES:
        for text in INLINE.findall(prose(page)):
            words = [word for word in re.split(r"\s+", text)[1:] if word not in ("-m", "servesim")]
            check_words(parser(), words, f"{named(page)}: `{text}`")


def check_words(inner: argparse.ArgumentParser, words: list[str], where: str) -> None:
    """Follow the words of a command through the parser, and know its options."""
    actions: Any = next((a for a in inner._actions if isinstance(a, argparse._SubParsersAction)), None)
    if actions is not None and words and not words[0].startswith("-"):
        for choice in words[0].split("|"):
            assert choice in actions.choices, f"{where}: no command {choice}"
        check_words(actions.choices[words[0].split("|")[0]], words[1:], where)
        return
    options = {option for action in inner._actions for option in action.option_strings}
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
            assert word in options, f"{where}: no option {word}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for groups in LINK.findall(prose(page)):
        target = groups[0] or groups[1]
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{named(page)}: {target}"
        assert ROOT in file.parents, f"{named(page)}: {target} leads out of the project"
        if anchor:
            assert anchor in anchors(file), f"{named(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower()) for head in heads]
    return {head.strip().replace(" ", "-") for head in plain}


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {groups[0].partition("#")[0] for groups in LINK.findall(prose(ROOT / "README.md"))}
    missing = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - linked
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_command_hides_outside_a_block(page: Path) -> None:
    hidden = re.search(r"^(?: {4}|\t)+(?:\$ )?(?:sim|make|python|pip) .*$", prose(page), re.MULTILINE)
    assert hidden is None, hidden


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_pages_speak_of_no_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|Users)/\w", page.read_text(encoding="utf-8"))
