"""How far a run is from saturation: its request rate, and the rate that the server can serve (its capacity).

The capacity is the throughput of a burst of the same requests, without its start and its end. Near saturation, an error
of 1 % in the step times can be an error of 100 % in the TTFT: no calibration is good enough to predict it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Optional

from servesim.core import Request
from servesim.core.request import CLIENT_FIELDS
from servesim.costs.device_profile import Profile
from servesim.costs.uncertainty import Uncertainty
from servesim.traces.trace import Trace

from .simulate import Run, simulate

NEAR = 0.03  # distance from saturation within which TTFT is not predicted
BURST = (400, 3000)  # fewest and most requests of a burst; between them, WAVES requests per slot
WAVES, MANY_SLOTS = 10, 256
FIT_DRAWS = 3  # cost models of the fit whose capacities differ


class Load(NamedTuple):
    """The load of a run, in requests per second."""

    rate: float
    capacity: float
    spread: float = 0.0  # relative standard deviation of the capacity

    @property
    def is_near(self) -> bool:
        """Whether the rate is so near to the capacity that either may be larger."""
        return abs(self.rate / self.capacity - 1) <= max(NEAR, 2 * self.spread)

    def describe(self, predicts_ttft: bool = True) -> str:
        """Return the load in one sentence."""
        half = 2 * self.spread * self.capacity
        digits = min(6, max(0, 1 - math.floor(math.log10(half or 0.05 * self.capacity))))
        capacity = f"capacity {self.capacity:,.{digits}f}" + (f" ± {half:,.{digits}f}" if half else "") + " req/s"
        if self.is_near:
            text = "" if predicts_ttft else ": TTFT cannot be predicted"
            return f"within {100 * max(NEAR, 2 * self.spread):.0f} % of saturation{text}; {capacity}"
        return f"load: {self.rate:,.{digits}f} req/s, {100 * self.rate / self.capacity:.0f} % of saturation; {capacity}"


def load_of(run: Run, profile: Profile, session: Optional[float] = None) -> Optional[Load]:
    """Return the load of a run; None if requests wait for others or arrive at once. `session`: spread of step times."""
    sent = sorted(request.sent for request in run.requests)
    if len(sent) < 4 or sent[-1] <= sent[0] or any(request.follows is not None for request in run.requests):
        return None
    capacity = capacity_of(run, profile)
    if not capacity or run.stuck:
        return None
    if session is None:
        return Load((len(sent) - 1) / (sent[-1] - sent[0]), capacity)
    costs = Uncertainty(profile.uncertainty.draws, 0.0).representatives(profile.cost, FIT_DRAWS)
    fits = [capacity_of(run, replace(profile, cost=cost)) for cost in costs] if profile.uncertainty.draws else []
    fit = math.sqrt(sum((other / capacity - 1) ** 2 for other in fits) / max(1, len(fits)))
    return Load((len(sent) - 1) / (sent[-1] - sent[0]), capacity, math.hypot(session, fit))


def capacity_of(run: Run, profile: Profile) -> float:
    """Return the requests per second that finish in the middle of a burst of the requests of a run."""
    engine = run.scenario.engine.model_copy(update={"client_timeout": None})
    scenario = run.scenario.model_copy(update={"engine": engine, "noise": False})
    slots = run.server.rules.slots(run.server.policy) or MANY_SLOTS
    count = min(BURST[1], max(BURST[0], WAVES * slots * engine.data_parallel_size))
    done = simulate(scenario, Trace(burst_of(run.requests, count), "burst", "synth"), profile=profile).requests
    ends = sorted(request.client_end for request in done if request.outcome == "finished" and request.client_end)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first]) if len(ends) > 4 and ends[last] > ends[first] else 0.0


def burst_of(requests: Sequence[Request], count: int) -> list[Request]:
    """Return requests that arrive at once: evenly chosen ones, or all of them several times."""
    chosen = []
    for k in range(count):
        request = requests[k * len(requests) // count if len(requests) > count else k % len(requests)]
        chosen.append(Request(**{**dict(zip(CLIENT_FIELDS, request.client_fields())), "id": k, "arrival": 0.0}))
    return chosen
