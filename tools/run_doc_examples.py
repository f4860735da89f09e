"""Run the examples of README and docs as a reader would, and write their printed output into the pages.

    python tools/run_doc_examples.py [PAGE ...]      default: all pages

The language of a fenced block decides what happens:
    console   every `$ command` runs; the text below it must be exactly what it prints
    bash      runs; exit code 0 expected
    sh        does not run (it needs hardware, a network or much time); the parser must know every `sim` command in it
    python    runs; exit code 0 expected. With a file name (```python my_policy.py) it is only saved under that name
    yaml, csv, json   saved for the following blocks if they have a file name
    text, mermaid     only displayed
The line above a block with a file name is "File `NAME`:", because rendered Markdown does not show the name.
The blocks of a page run in order, in one empty folder. For a recipe, it has the files of docs/recipes.md.
A port given with --port is replaced by a free one while a block runs. What a block leaves running is killed at its end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DISPLAY_ONLY = ("text", "mermaid", "yaml", "json", "csv", "html")
FENCE = re.compile(r"^( *)```(\S*) *(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PORT = re.compile(r"--port[ =](\d{4,5})\b")
PROGRAMS = [Path(sys.executable).parent]  # folders that are first in PATH
BLOCK_TIMEOUT_S = 1500  # for a busy machine; an idle one needs 30 s at most


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    name: str  # file name to save it under
    text: str
    line: int  # line number in the page, from 1
    start: int  # offset of its text in the page
    indent: str = ""


class ConsoleCommand(NamedTuple):
    """A command of a console block and the output below it."""

    command: str
    printed: str


def pages() -> list[Path]:
    """Return README, CONTRIBUTING and all pages of docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def recipes() -> list[Path]:
    """Return the pages with one recipe each."""
    return sorted((ROOT / "docs").glob("recipe-*.md"))


def parse_blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    blocks = []
    for match in FENCE.finditer(text):
        indent, language, name, body = match.groups()
        inside = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(language, name, inside, line, match.start(4), indent))
    return blocks


def parse_console(text: str) -> list[ConsoleCommand]:
    """Return the commands of a console block. A line that ends in a backslash continues on the next line."""
    commands: list[ConsoleCommand] = []
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        if not line.startswith("$ "):
            last = commands.pop()
            commands.append(ConsoleCommand(last.command, last.printed + line))
            continue
        command = line[2:]
        while command.endswith("\\\n"):
            command += next(lines)
        commands.append(ConsoleCommand(command, ""))
    return commands


def environment() -> dict[str, str]:
    """Return the environment of the examples: programs of this interpreter first, no terminal, no colours."""
    path = os.pathsep.join([*map(str, PROGRAMS), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "COLUMNS": "120", "MPLBACKEND": "Agg", "NO_COLOR": "1"}


def run_command(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Run one command; return its exit code, standard output and standard error.

    They go to files: a pipe would stay open, and this would wait, as long as a server in the background runs.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=out, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(BLOCK_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return code, texts[0], texts[1]


def with_free_ports(text: str) -> tuple[str, dict[str, str]]:
    """Replace the ports of a text by free ones; return it and the original of every new port."""
    originals: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for port in dict.fromkeys(PORT.findall(text)):
            free = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            originals[str(free.getsockname()[1])] = port
    return replace_numbers(text, {port: free for free, port in originals.items()}), originals


def replace_numbers(text: str, numbers: dict[str, str]) -> str:
    """Replace whole numbers of a text."""
    return re.sub(r"\b\d+\b", lambda match: numbers.get(match[0], match[0]), text)


def run_block(block: Block, folder: Path) -> Iterator[tuple[ConsoleCommand, str]]:
    """Run a block and yield each console command with its output. Raise RuntimeError if a command fails."""
    if block.name:
        (folder / block.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.name).write_text(block.text, encoding="utf-8")
    elif block.language == "console":
        for entry in parse_console(block.text):
            command, originals = with_free_ports(entry.command)
            code, out, errors = run_command(["bash", "-c", command], folder)
            if code:
                raise RuntimeError(f"line {block.line}: exit code {code}: {entry.command}{out}{errors}")
            yield entry, replace_numbers(out, originals)
    elif block.language in ("bash", "python"):
        interpreter = ["bash", "-ec"] if block.language == "bash" else [sys.executable, "-c"]
        code, out, errors = run_command([*interpreter, with_free_ports(block.text)[0]], folder)
        if code:
            raise RuntimeError(f"line {block.line}: exit code {code}\n{block.text}{out}{errors}")
    elif block.language not in ("sh", *DISPLAY_ONLY):
        allowed = ", ".join(("console", "bash", "sh", "python", *DISPLAY_ONLY))
        raise RuntimeError(f"line {block.line}: unknown block language {block.language!r}; use one of {allowed}")


def update_page(page: Path) -> bool:
    """Run a page and write the output of its commands into it; return whether the page changed."""
    text = page.read_text(encoding="utf-8")
    new, position = "", 0
    with tempfile.TemporaryDirectory(prefix="servesim-") as scratch:
        if page in recipes():
            for block in parse_blocks((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")):
                list(run_block(block, Path(scratch)))
        for block in parse_blocks(text):
            outputs = list(run_block(block, Path(scratch)))
            if outputs:
                body = "".join(f"$ {entry.command}{out}" for entry, out in outputs)
                old_length = len(block.text) + len(block.indent) * block.text.count("\n")
                new += text[position : block.start] + re.sub("^(?=.)", block.indent, body, flags=re.MULTILINE)
                position = block.start + old_length
    new += text[position:]
    if new != text:
        page.write_text(new, encoding="utf-8")
    return new != text


if __name__ == "__main__":
    for page in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        print(page.relative_to(ROOT), "changed" if update_page(page) else "unchanged", flush=True)
