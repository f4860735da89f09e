"""Format metrics with their intervals for sentences, tables and charts."""

from __future__ import annotations

import math
from typing import Optional

from servesim.runs.metric_table import Unit, format_quantity, unit_of

from .intervals import Interval


def format_mean(interval: Interval, metric: str, sign: bool = False, unit: Optional[Unit] = None) -> str:
    """Return a metric with half-width and unit; `unit` is that of several values, else the one of this value."""
    unit = unit or unit_of(metric, [interval.mean])
    text = format_quantity(interval.mean, interval.half_width, unit, sign)
    return text if math.isnan(interval.mean) else f"{text} {unit.name}".strip()


def format_metric(value: Optional[float], metric: str, unit: Optional[Unit] = None) -> str:
    """Return a metric with its unit; None is no value."""
    return format_mean(Interval(math.nan if value is None else float(value), None, 1), metric, unit=unit)


def format_percentage(fraction: Interval) -> str:
    """Return a relative difference in percent, with its half-width."""
    if math.isnan(fraction.mean):
        return "–"
    half_width = "" if fraction.half_width is None else f" ± {100 * fraction.half_width:.2f}"
    return f"{100 * fraction.mean:+.2f}{half_width} %"
