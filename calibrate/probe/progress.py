"""Progress of a probe: a bar on a terminal, otherwise a line every 10 seconds.

A probe ends when all points are precise, or when its time is spent. The bar shows the larger of both fractions, so it
moves from the first second: most points become precise in the last rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Callable

from servesim.execution.progress import REPORT_INTERVAL_S

Show = Callable[[Mapping[str, Any]], None]


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Show]:
    """Yield a function that shows a report of the probe."""
    if quiet:
        yield lambda report: None
    elif sys.stderr.isatty():
        with bar() as show:
            yield show
    else:
        yield print_lines()


def describe(report: Mapping[str, Any]) -> str:
    """Return points done, samples and time left."""
    failed = f", {report['failed']} failed" if report["failed"] else ""
    points = f"{report['known']}/{report['points']} points precise"
    return f"{points}, {report['samples']} samples{failed}, at most {report['left']:.0f} s left"


def fraction_done(report: Mapping[str, Any]) -> float:
    """Return the part of the probe that is done: of the points or of the time."""
    budget = report["seconds"] + report["left"]
    spent = report["seconds"] / budget if budget > 0 else 1.0
    precise = report["known"] / report["points"] if report["points"] else 1.0
    return min(1.0, max(spent, precise))


@contextmanager
def bar() -> Iterator[Show]:
    """Show a bar."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no monitor thread
    with tqdm(
        total=1.0, desc="probe", dynamic_ncols=True, bar_format="{desc}: {percentage:3.0f}%|{bar}|{postfix}"
    ) as line:

        def show(report: Mapping[str, Any]) -> None:
            line.n = max(line.n, fraction_done(report))
            line.set_postfix_str(describe(report))

        yield show


def print_lines() -> Show:
    """Return a function that prints a line if the last one is old."""
    printed_at = time.monotonic()

    def show(report: Mapping[str, Any]) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= REPORT_INTERVAL_S:
            printed_at = time.monotonic()
            print(f"probe: {100 * fraction_done(report):.0f} %, {describe(report)}", file=sys.stderr, flush=True)

    return show
