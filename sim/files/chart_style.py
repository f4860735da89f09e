"""One style for all charts: colours and fonts of the report pages (Plotly, CSS) and of the PNG files (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIGHT: Mapping[str, str] = {
    "page": "#fbfbf9", "card": "#ffffff", "ink": "#1d2126", "soft": "#5c6470", "rule": "#d9dbd6",
    "winner": "#0b6e4f", "baseline": "#b3541e", "front": "#3b5bdb", "point": "#9aa1ab", "limit": "#b3261e",
    "front_end": "#b9bec6", "queued": "#e0a33e", "prefill": "#3b5bdb", "stalled": "#c2456d", "decoding": "#0b8f6a",
    "swapped": "#7a5bb5",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "page": "#15181c", "card": "#1c2026", "ink": "#e8e9e6", "soft": "#a3abb6", "rule": "#343a42",
    "winner": "#4cc795", "baseline": "#f0955a", "front": "#8fa5ff", "point": "#6b7480", "limit": "#ff8a80",
    "front_end": "#6b7480", "queued": "#d99a3a", "prefill": "#7f97ff", "stalled": "#e0709a", "decoding": "#3fb68d",
    "swapped": "#a78be0",
}  # fmt: skip
SERIES = ("front", "baseline", "winner", "swapped", "queued", "stalled", "point")  # colours of several configurations
FONT = "system-ui, sans-serif"


def matplotlib_style() -> Any:
    """Return a context in which matplotlib draws in this style; SVG files are reproducible."""
    import matplotlib
    from cycler import cycler

    ink, soft = LIGHT["ink"], LIGHT["soft"]
    style: dict[Any, Any] = {
        "svg.hashsalt": "servesim",
        "figure.constrained_layout.use": True,
        "figure.facecolor": "white",
        "font.size": 9.5,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": soft,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=[LIGHT[name] for name in SERIES]),
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": LIGHT["rule"],
        "grid.linewidth": 0.7,
        "xtick.color": soft,
        "ytick.color": soft,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.frameon": False,
        "legend.fontsize": "small",
    }
    return matplotlib.rc_context(style)
