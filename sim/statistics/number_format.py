"""Format numbers for tables and charts: significant digits and units."""

from __future__ import annotations

import math
from typing import Optional

from servesim.runs.metric_table import metric_named

from .intervals import Interval

MAX_MS = 10_000  # from here on, times are printed in seconds


def format_number(value: float) -> str:
    """Return a number with its significant digits and thousands separators."""
    if math.isnan(value):
        return "–"
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 100 else 2 if size >= 1 else 3}f}" if size >= 0.001 else f"{value:.2g}"


def format_mean(interval: Interval, metric: str, sign: bool = False, seconds: Optional[bool] = None) -> str:
    """Return a metric with half-width and unit: utilisation in percent, 10,000 ms and more in seconds.

    `seconds` gives several values one unit: True for seconds, False for milliseconds.
    """
    value, half_width, name = interval.mean, interval.half_width, metric_named(metric).unit
    if math.isnan(value):
        return format_number(value)
    if metric_named(metric).is_percentage:
        value, half_width, name = 100 * value, None if half_width is None else 100 * half_width, "%"
    if name == "ms" and (abs(value) >= MAX_MS if seconds is None else seconds):
        value, half_width, name = value / 1000, None if half_width is None else half_width / 1000, "s"
    if half_width is not None and half_width < 1e-9 * abs(value):
        half_width = 0.0  # only rounding errors
    return f"{'+' if sign and value > 0 else ''}{format_number(value)}{format_half_width(half_width)} {name}".strip()


def format_metric(value: Optional[float], metric: str) -> str:
    """Return a metric with its unit; None is no value."""
    return format_mean(Interval(math.nan if value is None else float(value), None, 1), metric)


def format_half_width(half_width: Optional[float]) -> str:
    """Return ` ± N`, or nothing without an interval."""
    return "" if half_width is None else f" ± {format_number(half_width)}"


def format_percentage(fraction: Interval) -> str:
    """Return a relative difference in percent, with its half-width."""
    if math.isnan(fraction.mean):
        return "–"
    half_width = "" if fraction.half_width is None else f" ± {100 * fraction.half_width:.2f}"
    return f"{100 * fraction.mean:+.2f}{half_width} %"
