"""The step shapes that configurations visit in the simulation, and the times that a cost model gives them.

They stand for the earlier profile in a new fit: shapes that no live run measured keep its times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from servesim.calibrate.probe.fit import fit_samples
from servesim.calibrate.probe.predictions import predict
from servesim.calibrate.probe.sample_set import Samples
from servesim.config.scenario import Scenario
from servesim.core import Shape, StepCost
from servesim.costs.device_profile import Profile
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
    regions: dict[Region, list[Shape]] = {}
    for shape in sorted(separate_copies(recorder.shapes)):
        regions.setdefault(region(shape), []).append(shape)
    chosen: list[Shape] = []
    for shapes in regions.values():
        picks = np.unique(np.linspace(0, len(shapes) - 1, STEPS_PER_REGION).round().astype(int))
        chosen += [shapes[k] for k in picks]
    return chosen


def separate_copies(shapes: Iterable[Shape]) -> set[Shape]:
    """Return the shapes with their block copies as steps of their own, and without empty steps."""
    result = set()
    for shape in shapes:
        result.add(shape._replace(swapped=0))
        result.add(Shape(swapped=shape.swapped))
    return result - {Shape()}


def timed_steps(shapes: Sequence[Shape], cost: StepCost) -> Samples:
    """Return shapes with the times of a cost model as samples."""
    table = np.array(shapes, dtype=float).reshape(len(shapes), -1)
    seconds = predict(cost, table)
    kept = [k for k in range(len(shapes)) if seconds[k] > 0]
    columns = {name: [int(shapes[k][i]) for k in kept] for i, name in enumerate(Shape._fields)}
    return Samples.from_arrays([float(seconds[k]) for k in kept], columns)


def in_parts(cost: StepCost, shapes: Sequence[Shape], about: Mapping[str, Any]) -> PartsCost:
    """Return a cost model in parts with the times of another one at these shapes."""
    return cost if isinstance(cost, PartsCost) else fit_samples(timed_steps(shapes, cost), about, "the profile").cost
