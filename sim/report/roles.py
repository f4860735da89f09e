"""The configurations that a page compares: the baseline, and the winner or the one nearest to the constraints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from servesim.study.load_summary import LoadSummary
from servesim.study.ranking import Row, Summary
from servesim.study.verdict import verdict_of

Roles = Mapping[str, Row]  # winner, nearest or baseline -> configuration
COLOURS = {"winner": "@winner", "nearest": "@front", "baseline": "@baseline"}


def leader(summary: Summary) -> Optional[Row]:
    """Return the winner; without one, the configuration nearest to the constraints, or None."""
    return verdict_of(summary).nearest if summary.winner is None else summary.winner


def compared_rows(summary: Summary) -> dict[str, Row]:
    """Return the leader and the baseline by their roles; only the baseline if nothing beats it."""
    first = leader(summary)
    rows = {"baseline": summary.baseline}
    if first is None or first is summary.baseline:
        return rows
    return {"winner" if first is summary.winner else "nearest": first, **rows}


def roles_at_load(result: LoadSummary, load: float) -> dict[str, Row]:
    """Return the winner by capacity and the baseline, with their results at one load."""
    summary = result.by_load[load]
    if result.winner is None:
        return compared_rows(summary)
    rows = {row.config: row for row in summary.rows}
    winner = {} if result.winner.is_baseline else {"winner": rows[result.winner.config]}
    return {**winner, "baseline": summary.baseline}
