"""Tables and chart data of docs/proof.md and benchmarks/results/proof.md, from the file of benchmarks/proof.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Optional

from run_doc_examples import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from proof_rows import Row, coverage, median_error, read_rows

RESULT = ROOT / "benchmarks" / "results" / "proof.csv"
MOST_ROWS = 60  # of a set whose rows are shown one by one
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
    lines: list[tuple[str, ...]] = []
    for name, quantity, rows in groups(rows_of()):
        others = "; ".join(f"{rival} {percent(error)}" for rival, error in rivals_of(rows).items())
        calibrated = rows[0].calibrated_on.split(":")[-1].strip()
        worst = percent(max((row.error for row in rows), key=abs), sign=True)
        lines.append((name, quantity, str(len(rows)), calibrated, percent(median_error(rows)), worst, others))
    return lines


def single_rows() -> list[tuple[str, ...]]:
    """Return every figure of the small sets."""
    lines: list[tuple[str, ...]] = []
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


def note_rows() -> list[tuple[str, ...]]:
    """Return what each set assumes, and the reasons of bad predictions."""
    lines: list[tuple[str, ...]] = []
    rows = rows_of()
    for name in dict.fromkeys(row.set for row in rows):
        texts = [dict.fromkeys(getattr(row, key) for row in rows if row.set == name) for key in ("assumed", "reason")]
        lines.append((name, *("; ".join(text for text in column if text) for column in texts)))
    return lines


def largest(rows: Sequence[Row]) -> float:
    """Return the largest absolute error."""
    return max(abs(row.error) for row in rows)


def outside(rows: Sequence[Row]) -> float:
    """Return the share of counts that differ by more than 3 and by more than 15 %."""
    return sum(abs(row.predicted - row.measured) > max(3, 0.15 * row.measured) for row in rows) / len(rows)


class Target(NamedTuple):
    """A bound that was set before the runs were predicted."""

    text: str
    set: str  # beginning of its name
    quantities: tuple[str, ...]
    bound: float
    measure: Callable[[Sequence[Row]], float] = median_error
    run: str = ""  # part of its name


LATENCIES = ("E2E mean", "TTFT mean", "TPOT mean")
TARGETS = (
    Target("each figure of the RTX 4090 within 3 %", "layer profile alone", LATENCIES, 0.03, largest, "RTX 4090"),
    Target("each figure of the RTX PRO 6000 within 3 %", "layer profile alone", LATENCIES, 0.03, largest, "PRO 6000"),
    Target("median of E2E at most 2 %", "blis-h100", ("E2E mean",), 0.02),
    Target("median of TTFT at most 5 %", "blis-h100", ("TTFT mean",), 0.05),
    Target("median of E2E at most 3 %", "derived profiles: blis-validation", ("E2E mean",), 0.03),
    Target("median of TTFT at most 5 %", "derived profiles: blis-validation", ("TTFT mean",), 0.05),
    Target("median of TPOT at most 5 %", "silicon curves, dense", ("TPOT mean",), 0.05),
    Target("median of TPOT at most 5 %", "silicon curves, mixtures", ("TPOT mean",), 0.05),
    Target("counters exact", "ispass26: prefix", ("prefix queries (tokens)", "prefix hits (tokens)"), 0.0, largest),
    Target("preemptions within 15 %", "vLLM 44594", ("preemptions",), 0.15, largest),
    Target("throughput within 3 %", "vLLM 44594", ("out tok/s",), 0.03, largest),
    Target("the best setting", "vLLM 44594", ("watermark with the best throughput",), 0.0, largest),
    Target("retractions within 3 or 15 % (share of rows outside)", "SGLang", ("retractions",), 0.0, outside),
    Target("wall time within 3 %", "SGLang", ("wall s",), 0.03, largest),
    Target("P99 of TTFT within 15 %", "SGLang", ("TTFT p99 s",), 0.15, largest),
    Target("median of latency at most 8 %", "vLLM 0.22", ("mean e2el",), 0.08),
    Target("median of TTFT at most 8 %", "vLLM 0.22", ("mean ttft",), 0.08),
    Target("median of TPOT at most 8 %", "vLLM 0.22", ("mean tpot",), 0.08),
    Target("best budget, or within 2 % of it", "vLLM 0.22", ("measured latency of the chosen budget",), 0.02, largest),
)


def target_rows() -> list[tuple[str, ...]]:
    """Return every target and whether it is met."""
    lines: list[tuple[str, ...]] = []
    rows = rows_of()
    for target in TARGETS:
        of_target = [
            row
            for row in rows
            if row.set.startswith(target.set) and row.quantity in target.quantities and target.run in row.run
        ]
        if of_target:
            value = target.measure(of_target)
            # Six digits are stored, so a count that is equal has an error of exactly 0.
            lines.append((of_target[0].set, target.text, percent(value), "met" if value <= target.bound else "missed"))
    return lines


class Case(NamedTuple):
    """A case of a user: which rows show its error."""

    profile: str
    case: str
    method: str  # whether the method was fixed before or after errors of these rows were seen
    sets: tuple[str, ...]  # beginnings of their names
    reasons: Optional[tuple[str, ...]] = None  # beginnings of the reason of a bad prediction; None: any, (): none


CASES = (
    Case(
        "measured",
        "other load or lengths",
        "before",
        ("SGLang", "silicon curves, dense", "Qwen3-32B, Ascend A2: other"),
    ),
    Case("measured", "speculative decoding, other loads and acceptance", "after", ("Qwen3-32B, Ascend A2: suffix",)),
    Case("measured", "other runs of the model, below saturation", "after", ("blis-h100",), ()),
    Case("measured", "near or above saturation", "after", ("blis-h100",), ("near saturation", "overload")),
    Case("measured", "several times the load, lengths known as means", "before", ("Seed-OSS", "Llama-70B")),
    Case("measured", "other token budget or watermark", "after", ("vLLM 0.22", "vLLM 44594")),
    Case("measured", "mixture of experts", "after", ("silicon curves, mixtures", "gpt-oss")),
    Case("imported", "times of layers, one or several GPUs", "after", ("layer profile", "ispass26: layer times")),
    Case("derived", "same generation of GPU, no queue", "after", ("derived profiles",), ()),
    Case("derived", "other generation of GPU, no queue", "after", ("derived profiles",), ("the efficiencies",)),
    Case("derived", "requests wait", "after", ("derived profiles",), ("requests wait",)),
)
QUANTITIES = {  # column -> names of quantities
    "E2E": re.compile("e2e|wall", re.IGNORECASE),
    "TTFT": re.compile("ttft", re.IGNORECASE),
    "TPOT, throughput": re.compile("tpot|itl|tok/s", re.IGNORECASE),
}
EXPECTED_HEAD = ("profile", "case", "runs", *QUANTITIES, "inside the interval", "method fixed")


def shows(row: Row, case: Case) -> bool:
    """Whether a row shows the error of a case."""
    if not row.set.startswith(case.sets):
        return False
    return case.reasons is None or (row.reason.startswith(case.reasons) if case.reasons else not row.reason)


def spread(rows: Sequence[Row]) -> str:
    """Return the median error of some rows, and the error that nine of ten stay below."""
    if not rows:
        return ""
    errors = sorted(abs(row.error) for row in rows)
    high = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return f"{rounded(median_error(rows))} ({rounded(high)})"


def rounded(error: float) -> str:
    """Return an error as a percentage of two digits."""
    return f"{100 * error:.{0 if error >= 0.0995 else 1}f} %"


def expected_rows() -> list[tuple[str, ...]]:
    """Return what a user can expect, one line per case."""
    lines, rows = [], rows_of()
    for case in CASES:
        of_case = [row for row in rows if shows(row, case)]
        columns = [[row for row in of_case if words.search(row.quantity)] for words in QUANTITIES.values()]
        runs = str(len({(row.set, row.run) for row in of_case}))
        inside, known, width = coverage(of_case)
        held = f"{inside} of {known} (± {100 * width:.0f} %)" if known else ""
        lines.append((case.profile, case.case, runs, *map(spread, columns), held, case.method))
    return lines


ALL = "all sets"
COVERAGE_HEAD = ("set", "figures with an interval", "inside", "share", "target 85 to 99 %", "median half-width")
COVERED = (0.85, 0.99)  # the target, for every set and for all


def coverage_rows() -> list[tuple[str, ...]]:
    """Return how many measured values are inside their intervals, by set."""
    lines: list[tuple[str, ...]] = []
    rows = rows_of()
    for name in [*dict.fromkeys(row.set for row in rows), ALL]:
        inside, known, width = coverage(row for row in rows if name in (row.set, ALL))
        if known:
            share = inside / known
            target = "below" if share < COVERED[0] else "above" if share > COVERED[1] else "met"
            lines.append((name, str(known), str(inside), f"{100 * share:.0f} %", target, f"{100 * width:.0f} %"))
    return lines


OTHERS_SET = "derived profiles: blis-validation"
OTHERS_HEAD = ("simulator", "E2E mean", "TTFT mean", "TPOT mean")


def others_rows() -> list[tuple[str, ...]]:
    """Return the median errors of servesim and of other simulators for the same runs, best first."""
    by_quantity = {quantity: rows for name, quantity, rows in groups(rows_of()) if name == OTHERS_SET}
    if not by_quantity:
        return []
    columns = [rivals_of(by_quantity[quantity]) for quantity in OTHERS_HEAD[1:]]
    ours = ("servesim", *(percent(median_error(by_quantity[quantity])) for quantity in OTHERS_HEAD[1:]))
    return [ours, *((name, *(percent(column[name]) for column in columns)) for name in columns[0])]


TARGET_HEAD = ("set", "target", "figure", "")
NOTE_HEAD = ("set", "assumed", "why some predictions are bad")
SINGLE_HEAD = ("set", "run", "figure", "measured", "predicted", "error", "errors of others")
