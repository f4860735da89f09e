"""Cells of the tables of report.html."""

from __future__ import annotations

import math
from html import escape

from servesim.study.files import printed_label
from servesim.study.number_format import format_number
from servesim.study.ranking import Row


def label_tags(row: Row) -> str:
    """Return the labels of a configuration."""
    bad = ("stuck", "failed", "serves fewer")
    tags = [("tag bad" if name in bad else "tag", printed_label(name)) for name in row.labels]
    return "".join(f'<span class="{kind}">{escape(name)}</span>' for kind, name in tags)


def header_cell(name: str, numeric: bool = False) -> str:
    """Return a column header with a sort button."""
    return f'<th scope="col"{" class=n" if numeric else ""}><button type="button">{escape(name)}</button></th>'


def number_cell(value: float, text: str | None = None) -> str:
    """Return a numeric cell; a missing value has an empty sort key."""
    if math.isnan(value):
        return '<td class="n" data-v="">–</td>'
    return f'<td class="n" data-v="{value!r}">{format_number(value) if text is None else text}</td>'
