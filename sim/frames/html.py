"""A result as HTML: what a notebook shows for the last value of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_result(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a title, a table and sentences below it. The first line of `cells` is the head of the table.

    This is the only place that writes HTML for notebooks: it escapes every text, as names can come from files.
    """
    head, *body = cells
    lines = [row(head, "th"), "</thead><tbody>", *(row(line, "td") for line in body)]
    table = f'<table class="dataframe"><thead>{"".join(lines)}</tbody></table>'
    return f"<p><b>{escape(title)}</b></p>{table}" + "".join(f"<p>{escape(note)}</p>" for note in notes if note)


def row(cells: Sequence[str], tag: str) -> str:
    """Return one line of a table."""
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
