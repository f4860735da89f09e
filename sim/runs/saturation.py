"""How far a run is from saturation: its request rate, and the rate that the server can serve (its capacity).

The capacity is the throughput of a burst of the same requests, without its start and its end. Near saturation, an error
of 1 % in the step times can be an error of 100 % in the TTFT: no calibration is good enough to predict it.

An estimate needs no further run: the time that the prompts of the run took, and its decodes in batches that fill the
slots or the KV blocks. In 58 runs of five engines it was 6 % below to 13 % above the throughput of the burst: batches
are not always full. If only a few requests fit into the blocks, or ranks wait for each other, it is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Optional

from servesim.core import Request, Shape
from servesim.core.request import CLIENT_FIELDS
from servesim.costs.device_profile import Profile
from servesim.costs.uncertainty import Uncertainty
from servesim.traces.trace import Trace, has_field

from .build import add_drafter, cold_start_seconds
from .metric_table import digits_of
from .simulate import Run, simulate

FULL = 0.965  # throughput of a burst relative to that of batches that are always full: the middle of these runs
ESTIMATE_ERROR = 0.10  # of an estimated capacity, the largest of these runs
FEW_ROWS = 8  # batches that are so small are often not full
NEAR = 0.03  # distance from saturation within which TTFT is not predicted
MIN_REQUESTS = 4  # of a run with a rate
BURST = (400, 3000)  # fewest and most requests of a burst; between them, WAVES requests per slot
WAVES, MANY_SLOTS = 10, 256
FIT_DRAWS = 3  # cost models of the fit whose capacities differ


class Load(NamedTuple):
    """The load of a run, in requests per second."""

    rate: float
    capacity: float
    spread: float = 0.0  # relative standard deviation of the capacity

    def describe_estimate(self) -> str:
        """Return an estimated load in one sentence."""
        near = abs(self.rate / self.capacity - 1) <= NEAR + ESTIMATE_ERROR
        advice = "near saturation, TTFT cannot be predicted well; " if near else ""
        share, capacity = (float(f"{value:.2g}") for value in (100 * self.rate / self.capacity, self.capacity))
        load = f"load: {self.rate:,.3g} req/s, about {share:,.10g} % of saturation"
        return f"{load}; {advice}estimated capacity {capacity:,.10g} req/s"

    @property
    def is_near(self) -> bool:
        """Whether the rate is so near to the capacity that either may be larger."""
        return abs(self.rate / self.capacity - 1) <= max(NEAR, 2 * self.spread)

    def describe(self, predicts_ttft: bool = True) -> str:
        """Return the load in one sentence."""
        half = 2 * self.spread * self.capacity
        digits = digits_of(half or 0.05 * self.capacity)
        capacity = f"capacity {self.capacity:,.{digits}f}" + (f" ± {half:,.{digits}f}" if half else "") + " req/s"
        if self.is_near:
            text = "" if predicts_ttft else ": TTFT cannot be predicted"
            return f"within {100 * max(NEAR, 2 * self.spread):.0f} % of saturation{text}; {capacity}"
        return f"load: {self.rate:,.{digits}f} req/s, {100 * self.rate / self.capacity:.0f} % of saturation; {capacity}"


def rate_of(run: Run) -> Optional[float]:
    """Return the requests per second of a run; None if requests wait for others, arrive at once, or do not finish."""
    sent = run.measures.times[0]
    seconds = float(sent.max() - sent.min()) if len(sent) >= MIN_REQUESTS else 0.0
    if seconds <= 0 or run.stuck or has_field(run.measures.requests.asked, "follows"):
        return None
    return (len(sent) - 1) / seconds


def estimated_load(run: Run) -> Optional[Load]:
    """Return the load of a run, from what it computed; None if it is not known."""
    rate, capacity = rate_of(run), estimated_capacity(run)
    return None if rate is None or capacity is None else Load(rate, capacity)


def estimated_capacity(run: Run) -> Optional[float]:
    """Return the requests per second if the prompts take the time of the run, and decodes that of full batches."""
    server, mixed = run.server, run.work["mixed"]
    rows = sum(totals.decode_rows for totals in run.work.values())
    cluster = run.scenario.cluster
    if not rows or run.scenario.engine.data_parallel_size > 1 or (cluster is not None and cluster.pools):
        return None
    context = sum(totals.decode_pairs for totals in run.work.values()) / rows
    batch, size = server.rules.slots(server.policy) or math.inf, server.pool.block_size
    if server.policy.uses_block_pool:
        fitting = server.pool.total * size / (context + size / 2)
        batch = math.inf if fitting < FEW_ROWS else min(batch, fitting)
    if batch == math.inf:
        return None

    cost = add_drafter(run.profile.cost, run.scenario, run.profile)
    drafts = sum(totals.draft_tokens for totals in run.work.values()) / rows

    def decode_seconds(rows: float) -> float:
        count = max(1, round(rows))
        shape = Shape(decode_rows=count, decode_live=count, context=round(rows * context), drafts=round(rows * drafts))
        return cost.duration(shape)

    seconds = run.work["prefill"].seconds + mixed.seconds - sum(cold_start_seconds(run.scenario.engine, run.profile))
    if mixed.steps:
        seconds -= mixed.steps * decode_seconds(mixed.decode_rows / mixed.steps)
    seconds = max(0.0, seconds) + rows / batch * decode_seconds(batch)
    return FULL * run.servers * len(run.requests) / seconds if seconds > 0 else None


def load_of(run: Run, profile: Profile, session: float) -> Optional[Load]:
    """Return the load of a run; None if requests wait for others or arrive at once. `session`: spread of step times."""
    rate = rate_of(run)
    capacity = 0.0 if rate is None else capacity_of(run, profile)
    if rate is None or not capacity:
        return None
    costs = Uncertainty(profile.uncertainty.draws, 0.0).representatives(profile.cost, FIT_DRAWS)
    fits = [capacity_of(run, replace(profile, cost=cost)) for cost in costs] if profile.uncertainty.draws else []
    fit = math.sqrt(sum((other / capacity - 1) ** 2 for other in fits) / max(1, len(fits)))
    return Load(rate, capacity, math.hypot(session, fit))


def capacity_of(run: Run, profile: Profile) -> float:
    """Return the requests per second that finish in the middle of a burst of the requests of a run."""
    engine = run.scenario.engine.model_copy(update={"client_timeout": None})
    scenario = run.scenario.model_copy(update={"engine": engine, "noise": False})
    slots = run.server.rules.slots(run.server.policy) or MANY_SLOTS
    count = min(BURST[1], max(BURST[0], WAVES * slots * max(engine.data_parallel_size, run.servers)))
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
