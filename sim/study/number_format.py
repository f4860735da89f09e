"""Numbers as people read them: the digits that count, units, round marks for a scale."""

from __future__ import annotations

import math

from .intervals import Interval
from .objective import unit


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers between two."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Return a number for people: the digits that count, thousands apart."""
    if math.isnan(value):
        return "–"
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 100 else 2 if size >= 1 else 3}f}" if size >= 0.001 else f"{value:.2g}"


def spread(found: Interval, metric: str, sign: bool = False) -> str:
    """Return a figure with the half-width of its interval and its unit; long milliseconds as seconds."""
    value, half, name = found.mean, found.half, unit(metric)
    if math.isnan(value):
        return number(value)
    if name == "ms" and abs(value) >= 10_000:
        value, half, name = value / 1000, None if half is None else half / 1000, "s"
    if half is not None and half < 1e-9 * abs(value):
        half = 0.0  # the dust of floating point
    around = "" if half is None else f" ± {number(half)}"
    return f"{'+' if sign and value > 0 else ''}{number(value)}{around} {name}".strip()


def percentage(part: Interval) -> str:
    """Return a change as a percentage with its interval."""
    if math.isnan(part.mean):
        return "–"
    return f"{100 * part.mean:+.2f}{'' if part.half is None else f' ± {100 * part.half:.2f}'} %"


def columns(lines: list[list[str]]) -> list[str]:
    """Return lines of cells as text, the columns aligned."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
