"""A constraint: an upper or lower bound of a metric, such as `p99_ttft_ms <= 2000`.

A value violates a bound by a fraction of the bound, so violations of different metrics can be compared. A check against
a baseline also has bounds such as `p99_ttft_ms <= 1.05 * baseline`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.core.limits import is_number
from servesim.files.read import did_you_mean, quote
from servesim.runs.metric_table import METRICS, is_metric, unit_of

from .number_format import format_metric

PATTERN = re.compile(r"\s*(\w+(?:\[[^\[\]<>]*\])?)\s*(<=|>=)\s*([-+.\w]+)(\s*\*\s*baseline)?\s*")
VERDICTS = ("met", "undecided", "broken")  # the worst last


class Bound(NamedTuple):
    """An upper or lower bound of a metric."""

    metric: str
    sign: str  # <= | >=
    value: float  # of the metric, or of its ratio to the baseline
    of_baseline: bool = False

    def __str__(self) -> str:
        number = repr(float(self.value)).removesuffix(".0")
        relative = "baseline" if self.value == 1 else f"{number} * baseline"
        return f"{self.metric} {self.sign} {relative if self.of_baseline else number}"

    def verdict(self, low: float, high: float) -> str:
        """Return whether all values of an interval meet the bound, none does (also without a value), or only some."""
        best, worst = (low, high) if self.sign == "<=" else (high, low)
        return "met" if not self.violation(worst) else "broken" if self.violation(best) else "undecided"

    def violation(self, value: float) -> float:
        """Return by which fraction of the bound a value misses it: 0 if it meets it, infinity without a value."""
        if math.isnan(value):
            return math.inf
        excess = value - self.value if self.sign == "<=" else self.value - value
        return max(0.0, excess / (abs(self.value) or 1.0))


def parse_bound(spec: Any, where: str = "subject_to", baseline: bool = False) -> Bound:
    """Read `p99_ttft_ms <= 2000`; with a baseline also `p99_ttft_ms <= 1.05 * baseline` and `... <= baseline`."""
    match = PATTERN.fullmatch(spec) if isinstance(spec, str) else None
    alone = match is not None and match[3] == "baseline" and not match[4]
    try:
        value = 1.0 if alone else float(match[3]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not is_number(value):
        example = "METRIC <= VALUE or METRIC >= VALUE, e.g. p99_ttft_ms <= 500"
        raise BadInput(f"{where}: expected {example}, got {quote(spec)}")
    if not is_metric(match[1]):
        raise BadInput(f"{where}: {spec.strip()}: no metric {match[1]!r}{did_you_mean(match[1], METRICS)}")
    if (alone or match[4]) and not baseline:
        raise BadInput(f"{where}: {spec.strip()}: expected a number; only `sim check` compares with a baseline")
    return Bound(match[1], match[2], value, alone or bool(match[4]))


def parse_bounds(specs: Any, where: str = "subject_to", baseline: bool = False) -> tuple[Bound, ...]:
    """Read one bound or a list of bounds; equal bounds count once."""
    items = specs if isinstance(specs, (list, tuple)) else [specs]
    return tuple(dict.fromkeys(parse_bound(item, where, baseline) for item in items))


def describe_miss(bound: Bound, value: float) -> str:
    """Return `misses p99_ttft_ms <= 2000 (2,341 ms)`."""
    unit = unit_of(bound.metric, [])  # that of the bound
    text = "no value" if math.isnan(value) else format_metric(value, bound.metric, unit)
    return f"misses {bound} ({text})"


def describe_bounds(bounds: Sequence[Bound]) -> str:
    """Return the bounds as one text."""
    return ", ".join(map(str, bounds))
