"""Check a scenario against constraints: each one is met, undecided or broken.

The interval of a metric decides. It has the variation between replications and the uncertainty of the profile; a
constraint is undecided if the interval contains its limit. One replication of random requests does not show how much
they vary, so it has no interval. The ratio to a baseline decides a constraint such as `p99_ttft_ms <= 1.05 * baseline`,
in pairs with the same random numbers; if one side is 0, the difference decides. Unserved requests make the latencies
of the others shorter, so every check has a constraint on `failed`.

For continuous integration there are files: JUnit XML for test reports, Markdown for pull requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Optional
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from servesim.config.layers import Tree
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import load_profile
from servesim.files.terminal import PLAIN, Screen
from servesim.files.write import append, write_text
from servesim.runs.metric_table import Unit, metric_named, unit_of
from servesim.runs.notes import note
from servesim.runs.run_warnings import source_notes
from servesim.statistics.constraints import VERDICTS, Bound, describe_bounds, parse_bounds
from servesim.statistics.intervals import Interval, replications_for, with_draws
from servesim.statistics.number_format import format_mean, format_metric
from servesim.statistics.objective import Objective, check_figures

from .columns import EVERYWHERE, Column, html_result, json_row, printed_cells, table_lines
from .compare import Difference, difference
from .compared_runs import ComparedRuns, from_scenario, request_source
from .executor import Executor
from .replications import find_invalid
from .table import format_count
from .verdict import why_no_value

NO_VALUE = Interval(math.nan, None, 0)
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # file names can have them


@dataclass(frozen=True)
class CheckedBound:
    """A constraint, and the metric of the runs that it limits."""

    bound: Bound
    value: Interval  # of the replications and the draws of the cost model
    sampling: Interval  # of the replications only
    change: Optional[Difference] = None  # from the baseline
    problem: str = ""  # why the runs have no value
    confidence: float = 0.95

    @property
    def limit(self) -> float:
        """The limit of the metric."""
        if not self.bound.of_baseline:
            return self.bound.value
        return math.nan if self.change is None else self.bound.value * self.change.a

    @property
    def unit(self) -> Unit:
        """The unit of the limit, the value and the baseline."""
        return unit_of(self.bound.metric, [self.limit, self.value.mean, None if self.change is None else self.change.a])

    @property
    def verdict(self) -> str:
        """Met, undecided or broken."""
        if math.isnan(self.value.mean) or not self.bound.of_baseline:
            return self.bound.verdict(*limits_of(self.value))
        if self.change is None:
            return "undecided"
        if self.change.a > 0 and self.change.b > 0:
            change, low, high = self.change.relative
            return self.bound.verdict(1 + (change if low is None else low), 1 + (change if high is None else high))
        low, high = limits_of(self.change.excess(self.bound.value, self.confidence))
        low, high = (low, min(0.0, high)) if self.change.a > 0 else (max(0.0, low), high)  # no metric is below 0
        return self.bound._replace(value=0.0).verdict(low, high)

    @property
    def reason(self) -> str:
        """Why a constraint is undecided or broken, if the numbers do not say it."""
        if math.isnan(self.value.mean):
            return self.problem or f"the runs have no {self.bound.metric}"
        if self.verdict != "undecided":
            return ""
        if self.bound.of_baseline and self.change is None:
            return "the baseline has no value"
        return f"the interval contains the limit{self.advice}"

    @property
    def advice(self) -> str:
        """How many replications would decide: the calibration uncertainty stays, whatever their number."""
        total, sampled = self.value.half_width or 0.0, self.sampling.half_width
        rest = (self.value.mean - self.limit) ** 2 - max(0.0, total**2 - (sampled or 0.0) ** 2)
        if self.bound.of_baseline or not sampled or rest <= 0:
            return ""
        return f"; about {replications_for(math.sqrt(rest), self.sampling, self.confidence):,} replications decide"


@dataclass(frozen=True)
class Check:
    """The constraints of a scenario with their verdicts."""

    runs: ComparedRuns = field(repr=False)
    baseline: Optional[ComparedRuns] = field(repr=False)
    rows: Sequence[CheckedBound] = field(repr=False)
    confidence: float

    @property
    def verdict(self) -> str:
        """The worst verdict."""
        return max((row.verdict for row in self.rows), key=VERDICTS.index)

    @property
    def text(self) -> str:
        """The worst verdict with its constraints, and what the intervals are based on."""
        worst = describe_bounds([row.bound for row in self.rows if row.verdict == self.verdict])
        named = "All constraints are met" if self.verdict == "met" else f"{self.verdict.capitalize()}: {worst}"
        return f"{named}. {self.basis}"

    @property
    def basis(self) -> str:
        """What the intervals are based on."""
        varies, count, draws = scenario_from(self.runs.scenario).varies, len(self.runs.measured), len(self.runs.draws)
        if not count:
            return "No run."
        if count == 1 and varies:
            return "One run of random requests: no intervals, so the verdicts are those of these requests only."
        if count == 1 and not draws:
            return f"Nothing in the run is random: the verdicts are exact{' for these requests' * self.other_requests}."
        parts = [format_count(count, "replication")] if varies else []
        parts += [f"{draws} draws of the cost model (calibration uncertainty)"] if draws else []
        return f"{100 * self.confidence:g} % intervals of {' and '.join(parts)}."

    @property
    def other_requests(self) -> bool:
        """Whether the baseline serves other requests than the scenario."""
        sides = [side.scenario for side in self.sides.values()]
        return len(sides) > 1 and request_source(sides[0]) != request_source(sides[1])

    @property
    def sides(self) -> dict[str, ComparedRuns]:
        """The scenario, and the baseline if there is one."""
        return {"scenario": self.runs} | ({} if self.baseline is None else {"baseline": self.baseline})

    @property
    def notes(self) -> list[str]:
        """Remarks on the validity of the values."""
        profiles = [profile for side in self.sides.values() for profile in side.profiles]
        notes = [found.text for found in source_notes(profiles)]
        for side in self.sides.values():
            problem = find_invalid(side.runs)
            labels = ["saturated"] * (side.is_saturated and not problem) + ["outside profile"] * side.is_outside_profile
            texts = [note(label).text for label in labels]
            texts += problem.values() if side is self.baseline else ()  # the table has that of the scenario
            notes += [f"{side.name}: {text}" for text in texts]
        if self.other_requests:
            notes.append("the baseline has other requests (workload, trace or seed): a change can come from them")
        return notes

    @property
    def columns(self) -> list[Column]:
        """The columns of the table; those of the baseline only if there is one."""
        return [column for column in COLUMNS if self.baseline is not None or column not in BASELINE_COLUMNS]

    @property
    def cells(self) -> list[list[str]]:
        """The cells of the table; the first line is its head."""
        return printed_cells(self.columns, self.rows)

    def format(self, screen: Screen = PLAIN) -> str:
        """Return the names of the scenarios, the table, the verdict and the notes."""
        lines = [f"{role}: {side.name}" for role, side in self.sides.items()]
        lines += table_lines(self.columns, self.rows, screen)
        return "\n".join([*lines, self.text, *(f"note: {note}" for note in self.notes)])

    def as_json(self) -> dict[str, Any]:
        """Return the check as JSON."""
        rows = [json_row(self.columns, row) for row in self.rows]
        names = {role: side.name for role, side in self.sides.items()}
        return {**names, "verdict": self.verdict, "constraints": rows, "text": self.text, "notes": self.notes}

    def _repr_html_(self) -> str:
        return html_result(f"Check: {self.runs.name}", self.cells, [self.text, *self.notes])


def limits_of(interval: Interval) -> tuple[float, float]:
    """Return both limits of an interval; without one, the mean."""
    return interval.mean - (interval.half_width or 0.0), interval.mean + (interval.half_width or 0.0)


def describe_change(row: CheckedBound) -> str:
    """Return the change from the baseline: in percent with its interval, or absolute if one side is 0."""
    if row.change is None:
        return "–"
    mean, low, high = row.change.relative
    if math.isinf(mean) or (row.change.a and not row.change.b):
        return format_mean(row.change.change, row.bound.metric, True, row.change.unit)
    return f"{100 * mean:+.2f} %" + ("" if low is None or high is None else f" [{100 * low:+.2f}, {100 * high:+.2f}]")


def change_column(name: str, value: Any, **options: Any) -> Column:
    """Return a column of the change from the baseline."""
    return Column(name, lambda row: None if row.change is None else value(row.change), **options)


BASELINE_COLUMNS = (
    change_column("baseline", lambda change: change.a, shown=EVERYWHERE,
                  text=lambda row: format_metric(row.change and row.change.a, row.bound.metric, row.unit)),
    change_column("change", lambda change: change.relative.mean, text=describe_change, shown=EVERYWHERE),
    change_column("change_low", lambda change: change.relative.low),
    change_column("change_high", lambda change: change.relative.high),
)  # fmt: skip
COLUMNS = (  # a row is a CheckedBound
    Column("constraint", lambda row: str(row.bound), shown=EVERYWHERE),
    Column("limit", lambda row: row.limit, lambda row: format_metric(row.limit, row.bound.metric, row.unit),
           shown=EVERYWHERE),
    Column("value", lambda row: row.value.mean, lambda row: format_mean(row.value, row.bound.metric, unit=row.unit),
           shown=EVERYWHERE),
    Column("half_width", lambda row: row.value.half_width),
    *BASELINE_COLUMNS,
    Column("verdict", lambda row: row.verdict, lambda row: f"{row.verdict}{row.reason and f': {row.reason}'}",
           shown=EVERYWHERE, wrap=True),
    Column("reason", lambda row: row.reason),
)  # fmt: skip


def run_check(
    scenario: tuple[Tree, str], baseline: Optional[tuple[Tree, str]], subject_to: Any, executor: Executor,
    replications: int, draws: int, confidence: float = 0.95, where: str = "subject_to",
) -> Check:  # fmt: skip
    """Simulate a scenario, and a baseline if there is one, and check the constraints; both are trees with names."""
    bounds = parse_bounds(subject_to, where, baseline=True)
    if not bounds:
        raise BadInput(f"{where}: expected at least one constraint")
    relative = next((bound for bound in bounds if bound.of_baseline), None)
    if relative is not None and baseline is None:
        raise BadInput(f"{where}: {relative}: expected a number, because there is no baseline")
    sides = [scenario] if baseline is None else [scenario, baseline]
    scenarios = [scenario_from(*side) for side in sides]
    profiles = [side.profile for side in scenarios]
    check_figures([bound.metric for bound in bounds], profiles, where)
    known = [load_profile(profile).uncertainty for profile in profiles]
    uncertain = any(uncertainty.draws or uncertainty.session for uncertainty in known)
    draws = draws if uncertain and (replications > 1 or not scenarios[0].varies) else 0
    runs = [from_scenario(*side, replications, executor, draws) for side in sides]
    for side, names in zip(runs, ([bound.metric for bound in bounds], [b.metric for b in bounds if b.of_baseline])):
        for metric in names if not find_invalid(side.runs) else ():  # no limit without a value can be checked
            if math.isnan(side.mean(metric)):
                raise BadInput(f"{where}: {metric}: the runs of {side.name} have no value{why_no_value(metric)}")
    return check_runs(runs[0], runs[1] if baseline else None, bounds, confidence)


def check_runs(
    runs: ComparedRuns, baseline: Optional[ComparedRuns], bounds: Sequence[Bound], confidence: float = 0.95
) -> Check:
    """Check constraints, and that the scenario leaves no more requests unserved than the baseline, else none."""
    problem = ", ".join(find_invalid([*runs.runs, *runs.draws]).values())
    valid = baseline if baseline is None or not find_invalid(baseline.runs) else None
    if not any(bound.metric == "failed" for bound in bounds):
        bounds = [*bounds, Bound("failed", "<=", 0.0) if valid is None else Bound("failed", "<=", 1.0, True)]
    rows = []
    for bound in bounds:
        metric, change = bound.metric, None
        sampling = NO_VALUE if problem else runs.interval(metric, confidence)
        value = with_draws(sampling, list(runs.effects(metric).values()), confidence)
        if valid is not None and not math.isnan(value.mean):
            change = difference(valid, runs, Objective(metric, metric_named(metric).goal), confidence)
            change = None if math.isnan(change.a) else change
        rows.append(CheckedBound(bound, value, sampling, change, problem, confidence))
    return Check(runs, baseline, rows, confidence)


def write_junit(check: Check, path: str, allow_undecided: bool = False) -> None:
    """Write one test case per constraint. An undecided one is a failure; it is skipped if that is allowed."""
    root = Element("testsuites")
    suite = SubElement(root, "testsuite", name=f"sim check {xml_text(check.runs.name)}", time="0")
    tags = {"broken": "failure", "undecided": "skipped" if allow_undecided else "failure"}
    head, *body = check.cells
    for row, cells in zip(check.rows, body):
        case = SubElement(
            suite, "testcase", name=xml_text(str(row.bound)), classname=xml_text(check.runs.name), time="0"
        )
        if row.verdict in tags:
            message = ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], cells[1:]))
            SubElement(case, tags[row.verdict], type=row.verdict, message=xml_text(message))
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len([*suite.iter(tag)])))
    SubElement(suite, "system-out").text = xml_text(check.format())
    indent(root)
    write_text(path, tostring(root, "utf-8", xml_declaration=True).decode() + "\n")


def xml_text(text: str) -> str:
    """Return a text without the characters that XML does not allow."""
    return NOT_XML.sub("?", text)


def append_summary(check: Check, path: str) -> None:
    """Add the check as Markdown to the end of a file: several commands of a job write to one summary."""
    names = "; ".join(f"{role} {side.name}" for role, side in check.sides.items())
    head, *body = [[markdown_text(cell) for cell in line] for line in check.cells]
    lines = [head, ["---"] * len(head), *([*cells[:-1], f"**{cells[-1]}**"] for cells in body)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"- {markdown_text(note)}\n" for note in check.notes)
    title = f"## {check.verdict.capitalize()}: {markdown_text(names)}"
    append(path, f"{title}\n\n{table}\n{markdown_text(check.text)}\n\n{notes}\n")


def markdown_text(text: str) -> str:
    """Return a text on one line that is neither HTML nor the end of a cell."""
    return escape(" ".join(text.split()), quote=False).replace("|", "&#124;")
