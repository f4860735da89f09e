"""Shares as people write them, for every command; and how `sim verify` and `sim replay` judge a comparison by one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Optional


def add_tolerance(group: Any) -> None:
    """Add the options that `judge` reads."""
    group.add_argument("--tolerance", type=share, metavar="SHARE", help="exit 3 when an error is larger: 0.05 or 5%%")
    group.add_argument("--metrics", nargs="+", metavar="NAME", help="the figures that are judged")
    group.add_argument("--json", action="store_true", help="print the comparison as JSON")


def share(text: str) -> float:
    """Read 5% or 0.05. More than the whole must be in percent: a 5 alone could be meant as either."""
    text = text.strip()
    percent = text.endswith("%")
    try:
        value = float(text[:-1]) / 100 if percent else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value > 1 and not percent):
        raise argparse.ArgumentTypeError(f"expected a share such as 0.05 or 5%, got {text!r}")
    return value


def judge(args: argparse.Namespace, comparisons: Sequence[Any], sides: Mapping[str, Any], output: Optional[str]) -> int:
    """Print and write comparisons; return 3 when one is outside the tolerance."""
    import json
    from pathlib import Path

    from servesim.calibrate.replay.verify import JUDGED, as_json, ranks
    from servesim.calibrate.replay.verify_report import plot, rank_text, text, write_report

    judged = args.metrics or JUDGED
    for comparison in comparisons:
        for metric in judged:
            comparison.line(metric)  # an unknown name is bad input before anything is printed
    if args.json:
        report = {"settings": [as_json(c) for c in comparisons], "kendall_tau": ranks(comparisons)}
        print(json.dumps(report, indent=1, default=str))
    else:
        for comparison in comparisons:
            print(text(comparison, judged, args.tolerance))
        if len(comparisons) > 1:
            print(rank_text(comparisons))
    if output:
        write_report(comparisons, Path(output), args.tolerance)
        plot(sides, comparisons, Path(output) / "verify.png")
    if args.tolerance is None:
        return 0
    return 3 if any(c.outside(args.tolerance, judged) for c in comparisons) else 0
