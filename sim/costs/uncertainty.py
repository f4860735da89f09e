"""The joint uncertainty of the parameters of a cost model, and cost models that agree with the measurements.

A fit stores the parameters of fits to resampled data (bootstrap). Such a draw is scaled by one factor for all times:
the difference between two sessions on one device (clock frequency, temperature, driver).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, pstdev
from typing import Any

from servesim.core import BadInput, StepCost

from .derived import ScaledCost
from .linear import LinearCost
from .parts import PartsCost
from .terms import terms_of, with_terms

SESSION_SPREAD = 0.02  # standard deviation of all step times between sessions, from four sessions on an H200
RUN_SPREAD = 0.0135  # between runs of the session that measured the profile: two sessions on an H200 had 0.8 and 1.7 %

# Of step times that were not measured one by one on the engine, but fitted to whole runs of it, or imported as times of
# single layers; and of the TTFT, which also has times of the front end and of the client. Both are from the errors in
# benchmarks/results/proof.csv, of which the intervals then hold 85 % or more in most sets: a fit, not a test.
MODEL_SPREAD, TTFT_SPREAD = 0.07, 0.12
OVERLAP_SPREAD = 0.04  # of step times with steps in flight, from synchronous ones: four workloads on an H200
# Of step times outside the measured range, per factor e of the distance: five fits that were used at 2.4 to 4 times the
# running requests had step times that were wrong by 2 to 32 %.
RANGE_SPREAD = 0.15


@dataclass(frozen=True)
class Uncertainty:
    """Parameters of equally likely cost models, in the order of `parameters`, and the spread between sessions."""

    draws: Sequence[Sequence[float]] = ()
    session: float = SESSION_SPREAD
    ttft: float = 0.0  # spread of TTFT besides that of the step times

    def representatives(self, cost: StepCost, count: int) -> list[StepCost]:
        """Return `count` cost models that represent the uncertainty: the same ones in every call."""
        return [self.representative(cost, number, count) for number in range(count)]

    def representative(self, cost: StepCost, number: int, count: int) -> StepCost:
        """Return one of them.

        The factors of sessions are evenly spaced quantiles in a fixed random order, and the stored draws take turns. So
        a few cost models are enough.
        """
        drawn = with_parameters(cost, self.draws[number % len(self.draws)]) if self.draws else cost
        factor = math.exp(normal_scores(count)[number] * self.session - self.session**2 / 2)
        return ScaledCost(drawn, factor) if factor != 1.0 else drawn


def normal_scores(count: int) -> list[float]:
    """Return evenly spaced quantiles of the normal distribution with standard deviation 1, in a fixed random order."""
    scores = [NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)]
    random.Random("sessions").shuffle(scores)
    spread = pstdev(scores) or 1.0
    return [score / spread for score in scores]


def check_draws(stored: Any, cost: StepCost, where: str) -> None:
    """Raise BadInput if the draws of a profile do not have one number per parameter of its cost model."""
    draws = (stored or {}).get("draws") or ()
    expected = len(parameters(cost)) if draws and has_parameters(cost) else 0
    for k, draw in enumerate(draws):
        if len(draw) != expected or min(draw) < 0:
            found = f"{len(draw)} numbers" if len(draw) != expected else f"{min(draw):g}"
            raise BadInput(
                f"{where}: uncertainty.draws[{k}]: expected {expected} numbers of at least 0, one per parameter of the "
                f"cost, got {found}"
            )


def has_parameters(cost: StepCost) -> bool:
    """Return whether the numbers of a cost model can be replaced by random ones."""
    return isinstance(cost, (LinearCost, PartsCost))


def parameters(cost: StepCost) -> list[float]:
    """Return the parameters of a cost model: the numbers in seconds, and first value and increments of curves."""
    return [number for value in terms_of(cost).values() for number in flattened(value)]


def with_parameters(cost: StepCost, values: Sequence[float]) -> StepCost:
    """Return a cost model with other parameters."""
    remaining = iter(values)
    changed: StepCost = with_terms(cost, {name: restored(value, remaining) for name, value in terms_of(cost).items()})
    return changed


def flattened(value: Any) -> list[float]:
    """Return a number as it is, and a curve as its first value and its increments; flags and buckets have none."""
    if isinstance(value, float):
        return [value]
    if is_curve(value):
        columns = [[float(point[k]) for point in value] for k in range(1, len(value[0]))]
        return [high - low for column in columns for low, high in zip([0.0, *column], column)]
    return []


def is_curve(value: Any) -> bool:
    """Return whether a value is a list of points, all with the same number of values."""
    points = isinstance(value, (list, tuple)) and value and all(isinstance(point, (list, tuple)) for point in value)
    return bool(points) and len({len(point) for point in value}) == 1


def restored(value: Any, remaining: Any) -> Any:
    """Return a value with its numbers replaced by the next ones: the inverse of `flattened`."""
    if isinstance(value, float):
        return next(remaining)
    if not flattened(value):
        return value
    columns = []
    for _ in range(1, len(value[0])):
        total, column = 0.0, []
        for _ in value:
            total += next(remaining)
            column.append(total)
        columns.append(column)
    return tuple((point[0], *ys) for point, ys in zip(value, zip(*columns)))
