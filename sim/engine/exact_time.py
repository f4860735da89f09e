"""Exact times of SimPy events. This module is never compiled: mypyc compiles no subclasses of float."""

from __future__ import annotations


class At(float):
    """A delay of SimPy that ends at an exact time: the sum of the time now and of a difference has a rounding error."""

    def __radd__(self, now: float) -> float:
        return float(self)
