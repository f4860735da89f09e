"""Text for a terminal: tables that fit its width, colours, and no control characters from files.

Pipes and files get plain text of any width.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple, Optional, TextIO, cast

COLOURS = {"winner": "1;32", "baseline": "36", "cannot win": "33", "error": "31"}  # meaning -> codes of ECMA-48
MAX_WORD = 40  # longer words of a narrow column are broken
GAP = "  "
NUMBER_GAP = re.compile(r" (?=±|%)|(?<=±) |(?<=,) (?=[-+]?[\d.]+\])")  # inside of 1.2 ± 0.3, 5 % and [1.1, 1.3]
INDENT = "  "
# Characters that move the cursor, start a sequence, end a line, or change the direction of the text after them.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
PAINTED = re.compile("(\033\\[[0-9;]*m[^\033]*\033\\[0m)")
_painted: set[str] = set()  # what `paint` has returned: no other text may have an escape sequence


class Screen(NamedTuple):
    """Where text is printed."""

    width: Optional[int] = None  # characters per line; None: any number
    colours: bool = False


PLAIN = Screen()


def screen_of(stream: TextIO) -> Screen:
    """Return the properties of a stream. https://no-color.org says when to print without colours."""
    if not stream.isatty():
        return PLAIN
    colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Screen(shutil.get_terminal_size().columns, colours)


def paint(text: str, meaning: str, screen: Screen) -> str:
    """Return a line in the colour of its meaning; text without a meaning keeps the default colour."""
    code = COLOURS.get(meaning)
    if code is None or not screen.colours or not text:
        return text
    _painted.add(painted := f"\033[{code}m{printable(text)}\033[0m")
    return painted


def printable(text: str) -> str:
    """Return a text with its control characters as JSON writes them, except line ends, tabs and our own colours."""
    if not CONTROLS.search(text):
        return text
    return "".join(
        piece if piece in _painted else CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", piece)
        for piece in PAINTED.split(text)
    )


class PrintableStream:
    """A stream whose text is printable. Names in files may hold sequences that a terminal would execute."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def printable_output() -> Iterator[None]:
    """Print only printable text on standard output and standard error until the block ends."""
    out, error = (cast(TextIO, PrintableStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(error):
        yield


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream for control characters of our own, or for data that another program reads."""
    inner: TextIO = getattr(stream, "stream", stream)
    return inner


def align_columns(
    lines: Sequence[Sequence[str]],
    screen: Screen = PLAIN,
    text_columns: Sequence[str] = (),
    meanings: Optional[Mapping[int, str]] = None,
) -> list[str]:
    """Return lines of cells as text with aligned columns.

    On a narrow terminal, cells are wrapped between words: first those of `text_columns` (names in the first line), then
    all others. `meanings` are those of lines, by their number.
    """
    lines = [[" ".join(printable(cell).splitlines()) for cell in cells] for cells in lines]
    chosen = [column for column, name in enumerate(lines[0]) if name in text_columns]
    lines = [[NUMBER_GAP.sub("\xa0", cell) for cell in cells] for cells in lines]
    widths = fit_widths(lines, chosen, screen.width)
    result = []
    for number, cells in enumerate(lines):
        wrapped = [textwrap.wrap(cell, width, break_on_hyphens=False) if len(cell) > width else [cell]
                   for cell, width in zip(cells, widths)]  # fmt: skip
        for k in range(max(map(len, wrapped))):
            parts = [part[k] if k < len(part) else "" for part in wrapped]
            text = GAP.join(part.ljust(width) for part, width in zip(parts, widths)).rstrip().replace("\xa0", " ")
            result.append(paint(text, (meanings or {}).get(number, ""), screen))
    return result


def fit_widths(lines: Sequence[Sequence[str]], text_columns: Sequence[int], width: Optional[int]) -> list[int]:
    """Return the widths of the columns: the natural ones, narrowed while the table is too wide and words allow it."""
    columns = list(zip(*lines))
    widths = [max(map(len, cells)) for cells in columns]
    if width is None:
        return widths
    words = [[len(word) for cell in cells for word in cell.split(" ")] for cells in columns]
    smallest = [min(MAX_WORD, max(lengths, default=0)) for lengths in words]
    for group in (text_columns, range(len(columns))):
        while sum(widths) + len(GAP) * (len(widths) - 1) > width:
            widest = max((k for k in group if widths[k] > smallest[k]), key=lambda k: widths[k], default=None)
            if widest is None:
                break
            widths[widest] -= 1
    return widths


def two_columns(rows: Mapping[str, str]) -> str:
    """Return commands with their descriptions, wrapped to the width of the terminal."""
    left, width = len(INDENT) + max(map(len, rows)) + len(INDENT), line_width()
    if left > width / 3 and left + max(map(len, rows.values())) > width:  # long commands: no room beside them
        deeper = 3 * INDENT
        return "\n".join(f"{INDENT}{name}\n{fill(about, deeper, deeper)}" for name, about in rows.items())
    return "\n".join(fill(about, f"{INDENT}{name}".ljust(left), " " * left) for name, about in rows.items())


def fill(text: str, first: str = "", later: str = "") -> str:
    """Return a text in lines that fit into the terminal; `first` and `later` begin its lines."""
    width = line_width()
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def line_width() -> int:
    """Return the width of the terminal, or of the variable COLUMNS; a pipe or file has no limit."""
    return max(20, shutil.get_terminal_size((10_000, 24)).columns)
