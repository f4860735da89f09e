"""README, docs and the site: every command runs and prints the output shown, every link has a target."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import servesim.api
import yaml
from servesim.cli import Parser, parser

from .. import warm
from ..conftest import ROOT
from ..events import wait_until


def tool(name: str) -> ModuleType:
    """Load a tool; tools are not part of the package."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


pages, generate_tables = tool("run_doc_examples"), tool("generate_tables")
PAGES = pages.pages()
TABLE_PAGES = generate_tables.table_pages()
TESTED_ELSEWHERE = (ROOT / "docs" / "recipes.md", *pages.recipes())  # by test_recipes.py, which uses their results
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
INLINE = re.compile(r"(?<!`)`((?:sim|python -m servesim) [^`\n]+)`(?!`)")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


MARKS = {"README.md": [], "replay.md": [pytest.mark.live]}  # a replay in real time has to meet a tolerance
RUN_HERE = [
    pytest.param(page, id=page_name(page), marks=MARKS.get(page.name, [pytest.mark.slow]))
    for page in PAGES
    if page not in TESTED_ELSEWHERE
]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return str(pages.FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.fixture(autouse=True)
def warm_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `sim` in the examples start at once."""
    monkeypatch.setattr(pages, "PROGRAMS", [Path(warm.sim()).parent, *pages.PROGRAMS])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", RUN_HERE)
def test_every_command_of_a_page_prints_the_output_shown(page: Path, tmp_path: Path) -> None:
    for block in pages.parse_blocks(page.read_text(encoding="utf-8")):
        for command, printed in pages.run_block(block, tmp_path):
            assert command.printed == printed, f"{page_name(page)}:{block.line}: {command.command}"


def test_what_an_example_leaves_running_is_killed_and_does_not_delay_it(tmp_path: Path) -> None:
    """A server in the background keeps the standard error of its block open."""
    block = pages.Block("bash", "", "sleep 600 & echo $! > pid\nfalse", 1, 0)
    with pytest.raises(RuntimeError, match="exit code 1"):
        list(pages.run_block(block, tmp_path))
    wait_until(lambda: has_ended(tmp_path / "pid"), "the end of the process in the background")


def has_ended(pid: Path) -> bool:
    """Return whether the process with the number in a file has ended; a process that waits to be reaped has."""
    try:
        return Path(f"/proc/{pid.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_example_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time ends here when its child runs, on any machine."""

    class Late(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: Any = None) -> int:
            if timeout is None:
                return super().wait()
            assert timeout == pages.BLOCK_TIMEOUT_S
            wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the child")
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Late)
    with pytest.raises(subprocess.TimeoutExpired):
        list(pages.run_block(pages.Block("bash", "", "sleep 600 & echo $! > pid\nwait", 1, 0), tmp_path))
    wait_until(lambda: has_ended(tmp_path / "pid"), "the end of the child")


def test_examples_use_free_ports_and_show_the_written_ones(tmp_path: Path) -> None:
    text = "$ echo sim serve --port 18835 at http://127.0.0.1:18835 118835 > used; cat used\n"
    [(_, printed)] = pages.run_block(pages.Block("console", "", text, 1, 0), tmp_path)
    used = re.findall(r"\d+", (tmp_path / "used").read_text())
    assert used[0] == used[-2] != "18835"
    assert used[-1] == "118835"
    assert printed == "sim serve --port 18835 at http://127.0.0.1:18835 118835\n"


@pytest.mark.parametrize("page", TABLE_PAGES, ids=page_name)
def test_generated_tables_of_a_page_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate_tables.fill_tables(text) == text, "run python tools/generate_tables.py"


def test_the_page_of_commands_is_up_to_date() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert text == generate_tables.reference(), "run python tools/generate_tables.py"


@pytest.mark.parametrize(("name", "most"), [("my_policy.py", 20), ("my_sweep.yaml", 20), ("hf_fifo.py", 40)])
def test_an_example_in_the_docs_equals_its_file_or_is_a_link_to_it(name: str, most: int) -> None:
    file = (ROOT / "examples" / name).read_text(encoding="utf-8")
    blocks = [block for page in PAGES for block in pages.parse_blocks(page.read_text(encoding="utf-8"))]
    shown = [block.text for block in blocks if block.name == name]
    assert shown or any(f"](../examples/{name})" in page.read_text(encoding="utf-8") for page in PAGES)
    assert set(shown) <= {file}
    assert sum(bool(line.strip()) for line in file.splitlines()) <= most


def test_the_text_of_recipe_10_has_the_printed_interval() -> None:
    text = (ROOT / "docs" / "recipe-trust.md").read_text(encoding="utf-8")
    printed = re.search(r"^P99 TTFT .* ms \[(.+), (.+)\]$", text, re.MULTILINE)
    assert printed is not None and f"is between {printed[1]} and {printed[2]} ms" in text


def test_the_page_on_python_has_the_arguments_of_every_function() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^`servesim\.(\w+)\((.+)\)`$", text, re.MULTILINE))
    assert set(shown) == set(servesim.api.__all__) - {"load"}
    for name, arguments in shown.items():
        known = inspect.signature(getattr(servesim.api, name)).parameters.values()
        assert arguments == ", ".join(argument_text(one) for one in known), name


def argument_text(argument: inspect.Parameter) -> str:
    """Return an argument as the page shows it: `jobs=` must be named, `**keys` are others."""
    if argument.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{argument.name}"
    return f"{argument.name}=" if argument.kind is inspect.Parameter.KEYWORD_ONLY else argument.name


def test_commands_that_are_not_run_exist() -> None:
    """Blocks of sh need hardware or a long time: the parser must accept their `sim` commands."""
    checked = 0
    for page in PAGES:
        for block in pages.parse_blocks(page.read_text(encoding="utf-8")):
            if block.language != "sh" or block.name:  # a named block is a script, not a list of commands
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                checked += check_command(line, f"{page_name(page)}:{block.line}")
    assert checked


def check_command(line: str, where: str) -> bool:
    """Check a command line: parse `sim`, look up make targets and scripts; return whether it holds a command."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words:
        return False
    if words[0] == "sim":
        check_parses(words[1:], where)
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{where}: no target {words[1]}"
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file() or words[1].startswith("examples/server"), f"{where}: no {words[1]}"
    else:
        assert words[0] in OTHER_COMMANDS, f"{where}: {line}"
    return True


OTHER_COMMANDS = (
    ".", "chmod", "cp", "kill", "aiperf", "guidellm", "vllm", "pip", "python", "export", "curl", "pytest", "ssh",
    "scp", "cd", "git", "dask", "jupyter", "jupytext", "mypy", ".venv/bin/python",
)  # fmt: skip


def check_parses(words: list[str], where: str) -> None:
    """Parse a `sim` command line; fail with its position if the parser rejects it."""
    words = words[: words.index(">")] if ">" in words else words
    words = [word for word in words if word != "&"]
    try:
        parser().parse_args(words)
    except SystemExit as stop:
        if stop.code:
            pytest.fail(f"{where}: sim {' '.join(words)}")


def test_commands_in_the_text_exist() -> None:
    commands = parser()
    for page in PAGES:
        for text in INLINE.findall(prose(page)):
            words = [word for word in re.split(r"\s+", text)[1:] if word not in ("-m", "servesim")]
            check_words(commands, words, f"{page_name(page)}: `{text}`")


def check_words(inner: Parser, words: list[str], where: str) -> None:
    """Check subcommands and options of a command against the parser."""
    actions: Any = next((a for a in inner._actions if isinstance(a, argparse._SubParsersAction)), None)
    if actions is not None and words and not words[0].startswith("-"):
        for choice in words[0].split("|"):
            assert choice in actions.choices, f"{where}: no command {choice}"
        check_words(actions.choices[words[0].split("|")[0]], words[1:], where)
        return
    inner.finish()
    options = {option for action in inner._actions for option in action.option_strings}
    for word in words[: words.index("--")] if "--" in words else words:  # the rest is for another program
        if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
            assert word in options, f"{where}: no option {word}"


@pytest.mark.parametrize("page", TABLE_PAGES, ids=page_name)
def test_every_link_has_a_target(page: Path) -> None:
    for groups in LINK.findall(prose(page)):
        target = groups[0] or groups[1]
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_name(page)}: {target}"
        assert ROOT in file.parents, f"{page_name(page)}: {target} is outside the project"
        if anchor:
            assert anchor in anchors(file), f"{page_name(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, in GitHub's form."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    cleaned = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower()) for head in headings]
    return {head.strip().replace(" ", "-") for head in cleaned}


def test_the_readme_links_every_page() -> None:
    """Recipes are linked by their index."""
    linked = {groups[0].partition("#")[0] for groups in LINK.findall(prose(ROOT / "README.md"))}
    missing = {f"docs/{path.name}" for path in set((ROOT / "docs").glob("*.md")) - set(pages.recipes())} - linked
    assert not missing


def test_the_navigation_of_the_site_lists_every_page_once() -> None:
    """In four groups. `make docs` builds the site and checks its links."""
    groups = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert [name for group in groups for name in group] == ["Start", "Guides", "Reference", "Why trust it"]
    assert sorted(leaves(groups)) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def leaves(entry: Any) -> list[str]:
    """Return the pages of an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [page for part in inner for page in leaves(part)]


def test_the_pages_stay_short() -> None:
    """350,000 bytes are what the site may have, so that each page is read in five minutes."""
    assert sum(path.stat().st_size for path in (ROOT / "docs").glob("*.md")) <= 350_000


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_command_is_outside_a_code_block(page: Path) -> None:
    hidden = re.search(r"^(?: {4}|\t)+(?:\$ )?(?:sim|make|python|pip) .*$", prose(page), re.MULTILINE)
    assert hidden is None, hidden


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_pages_contain_no_local_paths(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|Users)/\w", page.read_text(encoding="utf-8"))
