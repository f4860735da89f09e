"""A constraint: an upper or lower bound of a metric, such as `p99_ttft_ms <= 2000`.

A value violates a bound by a fraction of the bound, so violations of different metrics can be compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.core.limits import is_number
from servesim.files.read import did_you_mean, quote
from servesim.runs.metric_table import METRICS, is_metric

from .number_format import format_metric

PATTERN = re.compile(r"\s*(\w+(?:\[[^\[\]<>]*\])?)\s*(<=|>=)\s*([-+.\w]+)\s*")


class Bound(NamedTuple):
    """An upper or lower bound of a metric."""

    metric: str
    sign: str  # <= | >=
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {repr(float(self.value)).removesuffix('.0')}"

    def violation(self, value: float) -> float:
        """Return by which fraction of the bound a value misses it: 0 if it meets it, infinity without a value."""
        if math.isnan(value):
            return math.inf
        excess = value - self.value if self.sign == "<=" else self.value - value
        return max(0.0, excess / (abs(self.value) or 1.0))


def parse_bound(spec: Any, where: str = "subject_to") -> Bound:
    """Read `p99_ttft_ms <= 2000`."""
    match = PATTERN.fullmatch(spec) if isinstance(spec, str) else None
    try:
        value = float(match[3]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not is_number(value):
        example = "METRIC <= VALUE or METRIC >= VALUE, e.g. p99_ttft_ms <= 500"
        raise BadInput(f"{where}: expected {example}, got {quote(spec)}")
    if not is_metric(match[1]):
        raise BadInput(f"{where}: {spec.strip()}: no metric {match[1]!r}{did_you_mean(match[1], METRICS)}")
    return Bound(match[1], match[2], value)


def parse_bounds(specs: Any, where: str = "subject_to") -> tuple[Bound, ...]:
    """Read one bound or a list of bounds; equal bounds count once."""
    items = specs if isinstance(specs, (list, tuple)) else [specs]
    return tuple(dict.fromkeys(parse_bound(item, where) for item in items))


def missed_bounds(bounds: Sequence[Bound], means: Mapping[str, float]) -> dict[Bound, float]:
    """Return the bounds that the means miss, with their violations."""
    violations = {bound: bound.violation(means.get(bound.metric, math.nan)) for bound in bounds}
    return {bound: violation for bound, violation in violations.items() if violation}


def describe_miss(bound: Bound, value: float) -> str:
    """Return `misses p99_ttft_ms <= 2000 (2,341 ms)`."""
    text = "no value" if math.isnan(value) else format_metric(value, bound.metric)
    return f"misses {bound} ({text})"


def describe_bounds(bounds: Sequence[Bound]) -> str:
    """Return the bounds as one text."""
    return ", ".join(map(str, bounds))
