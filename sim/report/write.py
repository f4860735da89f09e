"""Write report.html of the result of a sweep or a search."""

from __future__ import annotations

from pathlib import Path

from servesim.study.load_summary import LoadSummary, Result

from .load_page import write_load_report
from .sweep_page import write_sweep_report


def write_report(result: Result, path: Path) -> None:
    """Write the page of a result, with or without loads."""
    if isinstance(result, LoadSummary):
        write_load_report(result, path)
    else:
        write_sweep_report(result, path)
