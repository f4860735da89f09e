"""The Pareto front: the points that nothing else beats in every objective."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the places of the points not dominated, all objectives to be made small; equal points stay together."""
    order = sorted(range(len(points)), key=lambda place: tuple(points[place]))
    kept: list[int] = []
    for place in order:  # whoever dominates a point comes before it in this order
        if not any(dominates(points[other], points[place]) for other in kept):
            kept.append(place)
    return sorted(kept)


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether one is nowhere worse and somewhere better."""
    return all(a <= b for a, b in zip(one, other)) and any(a < b for a, b in zip(one, other))
