"""The residuals of observed runs as a function of the parameters of a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from servesim.core import StepCost

from .observed_runs import ObservedRun, Runs
from .parameters import front_end_key, value_of, with_values
from .residuals import Prediction, Residuals, predict, residuals_of

Array = NDArray[np.float64]
COLD_START_S = 10.0  # start value
MIN_START = 1e-9  # seconds: the solver works on logarithms, so no start value can be 0
CLEAR_CHANGE = 8.0  # standard deviations: in a smaller effect of a parameter, the scatter counts too much
MISSING = 10.0  # logarithm: the error of a figure that a simulation does not have


class Problem:
    """Residuals of the fitted runs as a function of the parameters."""

    def __init__(self, spec: Runs) -> None:
        self.spec = spec
        self.runs = spec.runs
        self.free = list(spec.free)
        self.terms = [name for name in self.free if not front_end_key(name)]  # of the cost model
        self.parts: dict[str, list[Residuals]] = {run.name: residuals_of(run, spec.spread) for run in self.runs}
        self.names = self.free + [
            f"cold.{run.name}.{kind}" for run in self.runs if run.cold for kind in ("prefill", "decode")
        ]
        self._cache: dict[tuple[object, ...], list[Array]] = {}

    def start(self) -> Array:
        """Return the start values of the parameters."""
        spec, keys = self.spec, {name: front_end_key(name) for name in self.free}
        values = [spec.front_end[key] if key else value_of(spec.cost, name) for name, key in keys.items()]
        for run in self.runs:
            if run.cold:
                first = max(1.0, float(run.first.min()) - 0.5) if run.has_request_times else COLD_START_S
                values += [first, COLD_START_S]
        return np.asarray(np.maximum(np.array(values), MIN_START), float)

    def width(self) -> Array:
        """Return the relative widths of the priors."""
        return np.array([self.spec.free.get(name, 1.0) for name in self.names])

    def cost(self, values: Array) -> StepCost:
        """Return the cost model with these parameters."""
        by_name = dict(zip(self.free, values.tolist()))
        return with_values(self.spec.cost, self.terms, [by_name[name] for name in self.terms])

    def front_end(self, values: Array) -> dict[str, float]:
        """Return the times of the front end, by key of `engine.front_end`."""
        fitted = {front_end_key(name): value for name, value in zip(self.free, values.tolist())}
        return {key: fitted.get(key, start) for key, start in self.spec.front_end.items()}

    def cold(self, values: Array) -> dict[str, tuple[float, float]]:
        """Return the cold start of every run that has one."""
        seconds = iter([float(value) for value in values[len(self.free) :]])
        return {run.name: (next(seconds), next(seconds)) for run in self.runs if run.cold}

    def predict(self, run: ObservedRun, values: Array) -> Prediction:
        """Simulate a run, which need not be one of the fitted ones."""
        cold = self.cold(values).get(run.name, (0.0, 0.0))
        return predict(run, self.cost(values), cold, self.front_end(values))

    def residuals(self, values: Array) -> Array:
        """Return the residuals in standard deviations."""
        return np.concatenate([self._scaled(run, values) for run in self.runs])

    def jacobian(self, values: Array) -> Array:
        """Return the derivatives of the residuals by the logarithms of the parameters."""
        blocks = []
        for run in self.runs:
            differences = max((part.differences for part in self.parts[run.name]), key=lambda sizes: sizes[0])
            columns = [self._derivative(run, values, k, differences) for k in range(len(values))]
            blocks.append(np.stack(columns, axis=1))
        return np.concatenate(blocks)

    def _derivative(self, run: ObservedRun, values: Array, k: int, differences: Sequence[float]) -> Array:
        """Return the derivative by one parameter, with the first difference whose effect is above the scatter."""
        at = self._scaled(run, values)
        for difference in differences:
            moved = values.copy()
            moved[k] *= np.exp(difference)
            change = self._scaled(run, moved) - at
            if np.sqrt(np.mean(change**2)) >= CLEAR_CHANGE:
                break
        return np.asarray(change / difference, float)

    def squares(self, values: Array, limit: float = np.inf) -> float:
        """Return the sum of squared residuals. It stops at the first run after which the sum is above the limit."""
        total = 0.0
        for run in self.runs:
            errors = self._scaled(run, values)
            total += float(errors @ errors)
            if total > limit:
                break
        return total

    def exact(self, values: Array) -> bool:
        """Return whether all residuals are within the resolution of the data."""
        return all(
            part.exact(errors)
            for run in self.runs
            for part, errors in zip(self.parts[run.name], self._errors(run, values))
        )

    @property
    def request_count(self) -> int:
        """Number of requests of all runs."""
        return sum(len(run.trace.requests) for run in self.runs)

    @property
    def error_inflation(self) -> float:
        """Factor of the standard errors: residuals are not independent."""
        return max(part.error_inflation for parts in self.parts.values() for part in parts)

    def without(self, left_out: ObservedRun) -> Problem:
        """Return the problem without a run, with the same weights."""
        rest = Problem(replace(self.spec, runs=[run for run in self.runs if run is not left_out]))
        rest.parts = {run.name: self.parts[run.name] for run in rest.runs}
        return rest

    def refine(self) -> None:
        """Use the full resolution of the data."""
        for parts in self.parts.values():
            for part in parts:
                part.refine()
        self._cache.clear()

    def reweigh(self, values: Array) -> None:
        """Set the weight of every run from the scatter of its residuals."""
        for run in self.runs:
            for part, errors in zip(self.parts[run.name], self._errors(run, values)):
                part.reweigh(errors)

    def _scaled(self, run: ObservedRun, values: Array) -> Array:
        parts = zip(self.parts[run.name], self._errors(run, values))
        return np.concatenate([errors / part.scale for part, errors in parts])

    def _errors(self, run: ObservedRun, values: Array) -> list[Array]:
        """Return the errors of a run, one array per part."""
        cold = self.cold(values).get(run.name, (0.0, 0.0))
        key = (run.name, *cold, *(float(value) for value in values[: len(self.free)]))
        if key not in self._cache:  # a cold start of one run does not change the others
            predicted = self.predict(run, values)
            errors = [part.errors(predicted) for part in self.parts[run.name]]
            self._cache[key] = [np.where(np.isfinite(array), array, MISSING) for array in errors]
        return self._cache[key]
