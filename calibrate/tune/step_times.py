"""The step shapes that configurations visit in the simulation, and the times that a cost model gives them.

They stand for the earlier profile in a new fit: shapes that no live run measured keep its times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Optional

import numpy as np
from servesim.calibrate.probe.fit import fit_samples
from servesim.calibrate.probe.sample_set import Samples, predict
from servesim.config.scenario import Scenario
from servesim.core import Shape, StepCost
from servesim.costs.device_profile import Profile
from servesim.costs.mapping import FRACTIONS
from servesim.costs.parts import PartsCost
from servesim.runs.simulate import simulate

STEPS_PER_REGION = 6
Region = tuple[str, int, int, bool]


class ShapeRecorder(StepCost):
    """Another cost model that records the shapes of all steps."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.shapes: set[Shape] = set()

    def seconds(self, shape: Shape) -> float:
        self.shapes.add(shape)
        return self.cost.duration(shape)


def region(shape: Shape) -> Region:
    """Return the kind of a step and its sizes within a factor of two."""
    return shape.kind, shape.decode_rows.bit_length(), shape.prefill_tokens.bit_length(), shape.cross > 0


def visited_shapes(scenarios: Iterable[Scenario], profile: Profile) -> list[Shape]:
    """Simulate scenarios and return a few shapes of each region that they visit."""
    recorder = ShapeRecorder(profile.cost)
    for scenario in scenarios:
        simulate(scenario, profile=Profile(profile.name, recorder, profile.about))
    # The copies of blocks are steps of their own.
    visited = {shape._replace(swapped=0) for shape in recorder.shapes}
    visited |= {Shape(swapped=shape.swapped) for shape in recorder.shapes}
    regions: dict[Region, list[Shape]] = {}
    for shape in sorted(visited - {Shape()}):
        regions.setdefault(region(shape), []).append(shape)
    chosen: list[Shape] = []
    for shapes in regions.values():
        picks = np.unique(np.linspace(0, len(shapes) - 1, STEPS_PER_REGION).round().astype(int))
        chosen += [shapes[k] for k in picks]
    return chosen


def modelled_steps(shapes: Sequence[Shape], cost: StepCost) -> Samples:
    """Return shapes with the times of a cost model as samples."""
    table = np.array(shapes, dtype=float).reshape(len(shapes), -1)
    seconds = predict(cost, table)
    kept = [k for k in range(len(shapes)) if seconds[k] > 0]
    return Samples.from_shapes([shapes[k] for k in kept], seconds[kept].tolist())


def in_parts(cost: StepCost, shapes: Sequence[Shape], about: Mapping[str, Any]) -> PartsCost:
    """Return a cost model in parts with the times of another one at these shapes."""
    return cost if isinstance(cost, PartsCost) else fit_samples(modelled_steps(shapes, cost), about, "the profile").cost


@dataclass(frozen=True)
class StepFactors(StepCost):
    """A cost model in parts with two factors. `calibrate.logs` fits them as parameters."""

    cost: PartsCost
    factor: float = 1.0  # of all steps
    decode_ratio: float = 1.0  # of decodes, in addition

    @cached_property
    def scaled(self) -> PartsCost:
        """The cost model with its factors."""
        return scaled_parts(self.cost, self.factor, self.factor * self.decode_ratio)

    def seconds(self, shape: Shape) -> float:
        return self.scaled.seconds(shape)

    @property
    def reads_longest(self) -> bool:
        return self.cost.reads_longest

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.scaled.decode(rows, live, context)

    def decode_unequal(self, rows: int, live: int, context: int, longest: int) -> float:
        return self.scaled.decode_unequal(rows, live, context, longest)

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        return self.scaled.linear_in_context(rows, live)


def scaled_parts(cost: PartsCost, prefill: float, decode: float) -> PartsCost:
    """Return the cost model with other times of its parts; copies of blocks and host time stay."""
    prompts, both = _scaled(cost.prefill, prefill), _scaled(cost.mixed, prefill)
    return replace(cost, prefill=prompts, mixed=both, decodes=_scaled(cost.decodes, decode))


def _scaled(part: Any, factor: float) -> Any:
    changes: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name in ("tokens", "rows"):  # curves
            changes[field.name] = tuple((point[0], *(factor * y for y in point[1:])) for point in value)
        elif isinstance(value, float) and field.name not in FRACTIONS:
            changes[field.name] = factor * value
    return replace(part, **changes)
