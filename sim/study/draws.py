"""Draws of the cost model in a study: how much the result of a configuration depends on the calibration.

Draw k is the same cost model for every configuration. It serves the requests of a replication that also ran with the
fitted cost model, so the difference of both runs shows only the effect of the calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator
from servesim.core.limits import DEFAULT_DRAWS, MAX_DRAWS, is_number
from servesim.execution.single_run import Record
from servesim.files.checked import expected_error
from servesim.runs.intervals import Draw


def check_draws(value: Any) -> int:
    """Return the number of draws in a file; true is the default number."""
    draws = {True: DEFAULT_DRAWS, False: 0}[value] if isinstance(value, bool) else value
    if not is_number(draws, 0, MAX_DRAWS) or draws % 1 or draws == 1:
        raise expected_error(f"true, false or a number of draws from 2 to {MAX_DRAWS}")
    return int(draws)


Draws = Annotated[int, BeforeValidator(check_draws)]


def planned_draws(count: int, replications: int) -> list[tuple[int, Draw]]:
    """Return the replication of every draw; the draws take turns."""
    return [(number % replications, Draw(number, count)) for number in range(count)]


def draw_effects(metric: str, runs: Sequence[Record], draws: Sequence[Record]) -> dict[int, float]:
    """Return the change of a metric in each draw: its value minus that of the same requests with the fitted costs."""
    fitted = {run["replication"]: run.get("figures", {}).get(metric) for run in runs}
    effects = {}
    for draw in draws:
        value, base = draw.get("figures", {}).get(metric), fitted.get(draw["replication"])
        if value is not None and base is not None and not draw.get("stuck"):
            effects[draw["draw"]] = value - base
    return effects


def paired_effects(effects: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Return the difference of two effects in every draw that both have."""
    return [effects[draw] - others[draw] for draw in effects if draw in others]


def count_wins(scores: Sequence[float], effects: Sequence[Mapping[int, float]]) -> tuple[list[int], int]:
    """Return how often each configuration has the smallest score (equal ones all win), and the number of draws."""
    common = set(effects[0]).intersection(*effects) if effects else set()
    wins = [0] * len(scores)
    for draw in common:
        values = [score + effect[draw] for score, effect in zip(scores, effects)]
        best = min(values)
        wins = [count + (value == best) for count, value in zip(wins, values)]
    return wins, len(common)
