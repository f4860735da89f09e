"""Compare two scenarios, runs or configurations of a sweep, in pairs with the same requests if there are some."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from servesim.core import BadInput
from servesim.files.terminal import PLAIN, Screen
from servesim.runs.leading import leading_metrics
from servesim.runs.metric_table import Unit, format_quantity, metrics_in, short_metric, unit_of
from servesim.runs.run_warnings import source_notes
from servesim.statistics.intervals import Interval, with_draws
from servesim.statistics.objective import Objective, parse_objective
from servesim.statistics.two_samples import RUN, RelativeChange, TwoSamples, relative_change

from .columns import EVERYWHERE, Column, Medium, json_row, table_lines
from .compared_runs import ComparedRuns, paired_draws, two_samples
from .replications import find_invalid
from .study_keys import INDIFFERENCE
from .sweep_text import NOT_TESTED
from .verdict import why_no_value

OUTCOMES = ("better", "worse")  # of a significant difference that is not too small


@dataclass(frozen=True)
class Difference:
    """B minus A in one metric."""

    objective: Objective
    a: float
    b: float
    change: Interval
    relative: RelativeChange  # the change as a fraction of A
    values: TwoSamples
    draws: Sequence[float] = ()  # B minus A in each draw of the cost model

    @property
    def unit(self) -> Unit:
        """The unit of A, of B and of their difference."""
        return unit_of(self.objective.metric, [self.a, self.b])

    @property
    def outcome(self) -> str:
        """How B compares with A: the same, no difference, not significant, not tested (other requests), better, worse.

        A difference that is too small to matter is none, as in a sweep. Random variation alone does not show this.
        """
        if self.change.mean == 0 and not self.change.half_width:
            return "the same"
        if self.a > 0 and self.b > 0:  # the relative interval is exact only then
            tested, significant = self.relative.low is not None, self.relative.excludes_zero
        else:
            tested, significant = self.change.half_width is not None, self.change.excludes_zero
        if not tested and not self.values.paired:
            return "not tested"
        _, low, high = self.relative
        is_surely_small = low is not None and high is not None and -INDIFFERENCE < low <= high < INDIFFERENCE
        if tested and not significant and not is_surely_small:
            return "not significant"
        if abs(self.relative.mean) < INDIFFERENCE:
            return "no difference"
        return "better" if self.objective.better(self.relative.mean) else "worse"

    def describe(self, b: str = "B") -> str:
        """Return the outcome with the size of the change and its interval; `b` is the name of B."""
        mean, low, high = self.relative
        each = "one run each" if self.values.units == (RUN, RUN) else "a single run"
        limits = "one run each" if self.values.paired else f"{each}, with other requests"
        if low is not None and high is not None:
            limits = f"interval {100 * low:+.2f} to {100 * high:+.2f} %"
        if self.draws:
            better = sum(self.objective.better(change) for change in self.draws)
            limits += f", better in {better} of {len(self.draws)} draws"
        if self.outcome == "the same":
            return self.outcome
        limits = limits if self.a and self.b else f"{'B' if self.a else 'A'} is 0"
        if self.outcome == "not tested":
            return f"the difference of {100 * mean:+.2f} % is not tested ({limits})"
        if self.outcome == "not significant":
            return f"the difference is not significant ({limits})"
        if self.outcome == "no difference":
            return f"no difference: {100 * mean:+.2f} % is below {100 * INDIFFERENCE:g} % ({limits})"
        if math.isinf(mean):
            return f"{b} is {self.outcome} ({limits})"
        return f"{b} is {100 * abs(mean):.2f} % {self.outcome} ({limits})"

    def excess(self, factor: float, confidence: float) -> Interval:
        """Return by how much B is above `factor` * A."""
        measured = self.values.difference(1.0, factor).interval(confidence)
        effects = [change - self.change.mean for change in self.draws]
        return with_draws(measured, effects, confidence)


def difference(a: ComparedRuns, b: ComparedRuns, objective: Objective, confidence: float) -> Difference:
    """Return the difference in one metric, with the uncertainty of the cost model if both have draws."""
    metric = objective.metric
    values = two_samples(a, b, metric)
    change = values.difference()
    mean_a, mean_b = (math.fsum(side) / len(side) for side in (values.a, values.b))
    pairs = paired_draws(a, b, metric)
    effects = [drawn_b - drawn_a for drawn_a, drawn_b in pairs]
    return Difference(
        objective, mean_a, mean_b, with_draws(change.interval(confidence), effects, confidence),
        relative_change(values, confidence, log_effects(mean_a, mean_b, pairs)), values,
        [change.mean + effect for effect in effects],
    )  # fmt: skip


def log_effects(a: float, b: float, pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the changes of the logarithm of B / A in every draw of the cost model."""
    positive = [(a + change_a, b + change_b) for change_a, change_b in pairs if a > -change_a and b > -change_b]
    return [math.log(drawn_b / drawn_a) - math.log(b / a) for drawn_a, drawn_b in positive] if a > 0 < b else []


def default_objectives(a: ComparedRuns, b: ComparedRuns) -> list[Objective]:
    """Return what a comparison shows: the metrics that lead for the load of A (of B if it is not known), then others.

    Goodput leads only if both have an SLO.
    """
    known = a if a.scenario or a.requests else b
    arrivals = [float(row["arrival"]) for row in known.requests]
    tree = {**known.scenario, **({} if has_goodput(a) and has_goodput(b) else {"slo": {}})}
    names = dict.fromkeys([*leading_metrics(tree, arrivals=arrivals), *metrics_in("compare")])
    return [parse_objective(name) for name in names]


def has_goodput(side: ComparedRuns) -> bool:
    """Whether the runs of A or of B have the metric that an SLO adds."""
    return bool(side.values("request_goodput"))


def compare(
    a: ComparedRuns, b: ComparedRuns, objectives: Sequence[Objective], confidence: float = 0.95
) -> list[Difference]:
    """Return the difference in each metric that A and B both have."""
    for side in (a, b):
        if side.runs and not side.measured:
            raise BadInput(f"{side.name}: {', '.join(find_invalid(side.runs).values())}")
    differences = [difference(a, b, objective, confidence) for objective in objectives]
    differences = [d for d in differences if not math.isnan(d.a) and not math.isnan(d.b)]
    if not differences:
        names = [objective.metric for objective in objectives]
        raise BadInput(f"{a.name} and {b.name} have none of {', '.join(names)} in common{why_no_value(names[0])}")
    return differences


def summarise(differences: Sequence[Difference], b: str = "B") -> str:
    """Return the comparison in sentences; `b` is the name of B."""
    if all(d.outcome == "the same" for d in differences):
        return "A and B are the same in every metric."
    first, *others = differences
    metrics = {word: [d.objective.metric for d in others if d.outcome == word] for word in OUTCOMES}
    parts = [f"{word} in {', '.join(names)}" for word, names in metrics.items() if names]
    more = f" {b} is {' and '.join(parts)}." if parts else ""
    return f"By {first.objective.metric}, {first.describe(b)}.{more}"


def name_of_b(a: ComparedRuns, b: ComparedRuns) -> str:
    """Return the name of B in sentences: its file or folder, unless A is the same one."""
    return "B" if a.name == b.name else b.name


def unit_column(name: Callable[[str], str], medium: Medium) -> Column:
    """Return the metric of each row with the unit of its values."""
    return Column("metric", lambda d: d.unit.after(name(d.objective.metric)), shown=(medium,))


COLUMNS = (  # a row is a Difference
    unit_column(short_metric, "terminal"),
    unit_column(str, "page"),
    Column("a", lambda d: d.a, lambda d: format_quantity(d.a, None, d.unit), "A", EVERYWHERE),
    Column("b", lambda d: d.b, lambda d: format_quantity(d.b, None, d.unit), "B", EVERYWHERE),
    Column(
        "difference",
        lambda d: d.change.mean,
        lambda d: format_quantity(d.change.mean, d.change.half_width, d.unit, True),
        "B - A",
        EVERYWHERE,
    ),
    Column("half_width", lambda d: d.change.half_width),
    Column("relative", lambda d: d.relative.mean),
    Column("relative_low", lambda d: d.relative.low),
    Column("relative_high", lambda d: d.relative.high),
    Column("outcome", lambda d: d.outcome),
    Column("verdict", Difference.describe, shown=EVERYWHERE, wrap=True),
    Column("pairs", lambda d: d.change.n if d.values.paired else 0),
    Column("paired_by", lambda d: d.values.units[0] if d.values.paired else None),
)


@dataclass(frozen=True)
class Compared:
    """B compared with A."""

    a: ComparedRuns = field(repr=False)
    b: ComparedRuns = field(repr=False)
    differences: Sequence[Difference] = field(repr=False)
    confidence: float = 0.95

    @property
    def verdict(self) -> str:
        """The result in sentences."""
        return summarise(self.differences, name_of_b(self.a, self.b))

    @property
    def basis(self) -> str:
        """What the intervals are based on, and whether they include the error of the cost model."""
        basis, draws = basis_of(self.differences), max(len(row.draws) for row in self.differences)
        text = f"{basis[:1].upper()}{basis[1:]}, {100 * self.confidence:g} % t intervals" if basis else "One run each"
        if draws:
            return f"{text} and {draws} draws of the cost model (calibration uncertainty)."
        return f"{text}, {NOT_TESTED}."

    def format(self, screen: Screen = PLAIN) -> str:
        """Return the names of A and B, the table, the result in sentences, and notes on the profiles."""
        lines = [f"A: {self.a.name}", f"B: {self.b.name}", *table_lines(COLUMNS, self.differences, screen)]
        notes = [f"note: {note.text}" for note in source_notes([*self.a.profiles, *self.b.profiles])]
        return "\n".join([*lines, f"{self.verdict} {self.basis}", *notes])

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON; `draws` are B minus A in each draw of the cost model."""
        rows = {}
        for row in self.differences:
            rows[row.objective.metric] = json_row(COLUMNS, row) | ({"draws": list(row.draws)} if row.draws else {})
        return {"a": self.a.name, "b": self.b.name, "metrics": rows, "verdict": self.verdict}


def basis_of(differences: Sequence[Difference]) -> str:
    """Return what most of the intervals are based on; empty without intervals."""
    return max(differences, key=lambda row: row.change.n).values.basis
