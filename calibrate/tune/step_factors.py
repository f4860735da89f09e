"""Multiply the times of a cost model in parts: one factor for steps with prompts, one for steps with decodes only."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Optional

from servesim.core import Shape, StepCost
from servesim.costs.parts import PartsCost


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

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.scaled.decode(rows, live, context)

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
        elif isinstance(value, float) and field.name != "overlap":  # a fraction
            changes[field.name] = factor * value
    return replace(part, **changes)
