"""The knee of a load: the request rate at which the P99 of TTFT starts to rise.

A lone request waits for no other one. The knee is the highest rate at which the P99 of TTFT is at most twice that of
lone requests.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Optional

from servesim.runs.request_rate import round_rate
from servesim.study.single_run import Record

RISE = 2.0  # times the P99 of TTFT of lone requests
LONE = 1e-3  # times the rate of the scenario, at which requests do not meet
BUSY = 8  # requests in the server at the first rate, about
MAX_DOUBLINGS = 20
HALVINGS = 3  # of the interval between a rate below the knee and twice this rate
DIGITS = 2  # of the knee
RunAt = Callable[[float], Awaitable[Record]]  # runs a scenario at a rate


async def find_knee(run: RunAt, own: float) -> Optional[float]:
    """Return the knee of a scenario with the rate `own`, None if it has none."""
    lone = (await run(own * LONE)).get("metrics", {})
    ttft, e2el = lone.get("p99_ttft_ms"), lone.get("mean_e2el_ms")
    if not ttft or not e2el:
        return None

    async def is_below(rate: float) -> bool:
        record = await run(rate)
        return not record.get("saturated", True) and record["metrics"].get("p99_ttft_ms", math.inf) <= RISE * ttft

    low = BUSY * 1e3 / e2el  # requests per second, by Little's law
    step = 2.0 if await is_below(low) else 0.5
    for _ in range(MAX_DOUBLINGS):
        if await is_below(low * step) == (step < 1):
            break
        low *= step
    low = min(low, low * step)
    high = 2 * low
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if await is_below(middle) else (low, middle)
    return round_rate(low, DIGITS)
