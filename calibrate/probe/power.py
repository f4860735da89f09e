"""The power of a device by kind of step: steps of one kind run without a break while a tool samples it.

Single steps are shorter than the interval of the tool. A phase cycles through all shapes of the probe, so the power is
a mean over them. It runs in the worker: Python 3.9, standard library.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Callable, Optional

from servesim.calibrate.device.backend import STEP_FAILURES
from servesim.calibrate.device.counters import DeviceSampler

PHASE_S = 3.0  # of each kind
SETTLE_S = 1.0  # at the start of a phase: tools report a mean over up to a second
KINDS = ("decode", "prefill", "mixed", "idle")  # idle last: on a server, the device rests after work


def measure_power(steps: dict[str, Sequence[Callable[[], Any]]], sampler: DeviceSampler) -> Optional[dict[str, Any]]:
    """Return watts by kind, None if the tool reports no power. `steps` are functions that run one step, by kind."""
    if not any(sample.power is not None for sample in sampler.samples):
        return None
    power: dict[str, Any] = {}
    for kind in KINDS:
        start = time.perf_counter()
        run_phase(steps.get(kind, ()), start + PHASE_S) if kind != "idle" else time.sleep(PHASE_S)
        watts = [s.power for s in sampler.samples if s.power is not None and s.time >= start + SETTLE_S]
        if watts and (kind == "idle" or steps.get(kind)):
            power[kind] = round(fmean(watts), 1)
    if not {"idle", "prefill", "decode"} <= set(power):
        return None
    return {**power, "source": f"{sampler.tool}: mean over all step shapes of the probe, each kind {PHASE_S:g} s"}


def run_phase(steps: Sequence[Callable[[], Any]], end: float) -> None:
    """Run steps in turn until the time is over. A shape that fails is left out, as in the probe."""
    usable = list(steps)
    while usable and time.perf_counter() < end:
        for step in list(usable):
            with contextlib.suppress(*STEP_FAILURES):
                step()
                if time.perf_counter() >= end:
                    return
                continue
            usable.remove(step)
