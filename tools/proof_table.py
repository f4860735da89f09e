"""Tables and chart data of docs/proof.md, from benchmarks/results/proof.csv (`python benchmarks/proof.py`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from run_doc_examples import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from proof_rows import Row, median_error, read_rows

RESULT = ROOT / "benchmarks" / "results" / "proof.csv"
MOST_ROWS = 30  # of a set whose rows are shown one by one
SUMMARY_HEAD = ("set", "figure", "runs", "calibrated on", "median error", "worst", "median error of others")


def rows_of(path: Path = RESULT) -> list[Row]:
    """Return the rows, or none if the benchmark was never run."""
    return read_rows(path) if path.is_file() else []


def groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield the rows of each quantity of each set, in the order of the file."""
    order = {key: k for k, key in reversed(list(enumerate((row.set, row.quantity) for row in rows)))}
    for (name, quantity), group in groupby(
        sorted(rows, key=lambda row: order[row.set, row.quantity]), key=lambda row: (row.set, row.quantity)
    ):
        yield name, quantity, list(group)


def rivals_of(rows: Sequence[Row]) -> dict[str, float]:
    """Return the median errors of other simulators, each over the runs that it predicted, best first."""
    names = dict.fromkeys(name for row in rows for name in row.rivals)
    return dict(sorted(((name, median_error(rows, name)) for name in names), key=lambda pair: pair[1]))


def percent(error: float, sign: bool = False) -> str:
    """Return an error as a percentage."""
    return f"{100 * error:{'+' if sign else ''}.1f} %"


def summary_rows() -> list[tuple[str, ...]]:
    """Return one line per set and quantity."""
    lines = []
    for name, quantity, rows in groups(rows_of()):
        others = "; ".join(f"{rival} {percent(error)}" for rival, error in rivals_of(rows).items())
        calibrated = rows[0].calibrated_on.split(":")[-1].strip()
        worst = percent(max((row.error for row in rows), key=abs), sign=True)
        lines.append((name, quantity, str(len(rows)), calibrated, percent(median_error(rows)), worst, others))
    return lines


def single_rows() -> list[tuple[str, ...]]:
    """Return every figure of the small sets."""
    lines = []
    rows = rows_of()
    for name in dict.fromkeys(row.set for row in rows):
        of_set = [row for row in rows if row.set == name]
        for row in of_set if len(of_set) <= MOST_ROWS else ():
            others = "; ".join(
                f"{rival} {percent(value / row.measured - 1, True)}" for rival, value in row.rivals.items()
            )
            figures = (f"{row.measured:,.5g}", f"{row.predicted:,.5g}", percent(row.error, sign=True))
            lines.append((name, row.run, row.quantity, *figures, others))
    return lines


def note_rows() -> list[tuple[str, str, str]]:
    """Return what each set assumes, and the reasons of bad predictions."""
    lines = []
    rows = rows_of()
    for name in dict.fromkeys(row.set for row in rows):
        texts = [dict.fromkeys(getattr(row, key) for row in rows if row.set == name) for key in ("assumed", "reason")]
        lines.append((name, *("; ".join(text for text in column if text) for column in texts)))
    return lines


NOTE_HEAD = ("set", "assumed", "why some predictions are bad")
SINGLE_HEAD = ("set", "run", "figure", "measured", "predicted", "error", "errors of others")
