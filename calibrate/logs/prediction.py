"""Simulate an observed run with trial costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from servesim.config.scenario import ColdStart
from servesim.core import StepCost
from servesim.costs.device_profile import Profile
from servesim.runs.metrics import Metrics
from servesim.runs.simulate import simulate

from .observed_runs import ObservedRun

Array = NDArray[np.float64]
MIN_REQUESTS = 100  # of a shortened run


@dataclass(frozen=True)
class Prediction:
    """Simulated times of an observed run, in seconds since its first request was sent."""

    first: Array
    end: Array
    makespan: float
    metrics: Metrics


def predict(run: ObservedRun, cost: StepCost, cold: tuple[float, float] = (0.0, 0.0)) -> Prediction:
    """Simulate a run."""
    engine = run.scenario.engine.model_copy(update={"cold_start": ColdStart(prefill=cold[0], decode=cold[1])})
    scenario = run.scenario.model_copy(update={"engine": engine})
    done = simulate(scenario, run.trace, profile=Profile("fit", cost))
    start = min(request.arrival for request in run.trace.requests)
    first = np.array([request.first_token for request in done.requests], float)[run.index]
    end = np.array([request.client_end for request in done.requests], float)[run.index]
    return Prediction(first - start, end - start, done.measures.makespan, done.measures)


def shortened(run: ObservedRun, requests: int) -> ObservedRun:
    """Return the first requests of a run with request times, without those that shared steps with later ones."""
    if not run.has_request_times or len(run.trace.requests) <= requests:
        return run
    first_later = run.first[run.index >= requests].min(initial=np.inf)
    kept = (run.index < requests) & (run.end <= first_later)
    if kept.sum() < MIN_REQUESTS:
        return run
    trace = replace(run.trace, requests=run.trace.requests[:requests])
    end = run.end[kept]
    return replace(run, trace=trace, index=run.index[kept], first=run.first[kept], end=end, makespan=float(end.max()))
