"""Cells of CSV files that a spreadsheet would run as a formula get a leading `'`; reading removes it again."""

from __future__ import annotations

from typing import Any

FORMULA = ("=", "+", "-", "@")
MARKED = (*FORMULA, "'")


def mark_formula(cell: Any) -> Any:
    """Return a text cell with a leading `'` if a spreadsheet would take it as a formula; other cells unchanged."""
    return f"'{cell}" if type(cell) is str and cell.startswith(MARKED) and _is_formula(cell) else cell


def unmark_formula(cell: str) -> str:
    """Return the text that `mark_formula` was given."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell) else cell


def _is_formula(cell: str) -> bool:
    """Ignore leading `'`, so that marking and unmarking agree on every text."""
    text = cell.lstrip("'")
    if not text.startswith(FORMULA):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False  # a negative number is harmless
