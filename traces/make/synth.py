"""Make a workload: the `workload` section of a scenario turned into a trace.

    requests: 1000                                  # or duration: 600, seconds
    arrivals: {kind: poisson, rate: 8.2}            # ARRIVALS lists the kinds
    lengths:                                        # SIDES and PAIRS list the kinds
      kind: lognormal
      prompt: {mean: 265, sd: 300}
      output: {mean: 255, sd: 200, max: 2048}
    limit: 2048                                     # tokens each may write, if not what it will write
    priorities: {0: 0.9, 1: 0.1}                    # priority -> part of the requests

or `contest: {X: 0.5, T: 3000}`, or `mix: [...]`, several such workloads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import numpy as np
from servesim.core import BadInput
from servesim.traces.edit import merge
from servesim.traces.random_streams import stream
from servesim.traces.trace import Columns, Trace, assemble

from .arrivals import Arrivals, arrivals
from .contest import contest
from .lengths import Lengths, lengths
from .section import Section

KEYS = ("requests", "duration", "arrivals", "lengths", "limit", "priorities")
SHORT = ("contest", "mix")


def synthesise(workload: Mapping[str, Any], seed: int = 0) -> Trace:
    """Return the trace of a workload; the same seed gives the same one."""
    if type(seed) is not int or seed < 0:
        raise BadInput(f"seed: expected a whole number of 0 or more, got {seed!r}")
    return _made(Section(workload, "workload"), seed)


def _made(section: Section, seed: int) -> Trace:
    for short, make in (("contest", _contest), ("mix", _mix)):
        if short in section:
            section.only((short,))
            return make(section, seed)
    section.only((*KEYS, *SHORT))
    if ("requests" in section) == ("duration" in section):
        raise BadInput(
            f"{section.where}: expected one of requests and duration, got {'both' if 'requests' in section else 'none'}"
        )
    requests = section.whole("requests", most=10**8) if "requests" in section else None
    duration = section.positive("duration") if "duration" in section else None
    when = arrivals(section.section("arrivals"), requests, duration, seed)
    if not len(when.times):
        raise section.bad("duration", "time for at least one request")
    long = lengths(section.section("lengths"), len(when.times), seed)
    columns = _columns(when, long)
    if "limit" in section:
        limit = section.whole("limit")
        columns.output = [min(output, limit) for output in columns.output]
        columns.limit = [limit] * len(columns.output)
    if "priorities" in section:
        columns.priority = _priorities(section.section("priorities"), len(when.times), seed)
    return assemble(columns, f"workload seed={seed}", "synth")


def _columns(when: Arrivals, long: Lengths) -> Columns:
    columns = Columns(long.prompts, long.outputs, limit=long.limits)
    columns.arrival = list(when.times.tolist())
    if when.users is not None and when.pauses is not None:
        users = int(when.users.max()) + 1
        count = len(when.times)
        columns.session = [f"user-{user}" for user in when.users]
        columns.after = [None if k < users else k - users for k in range(count)]
        columns.delay = list(when.pauses.tolist())
        columns.arrival[users:] = [None] * (count - users)
    return columns


def _priorities(section: Section, count: int, seed: int) -> list[int]:
    levels = list(section.values)
    for level in levels:
        if type(level) is not int:
            raise BadInput(f"{section.where}: expected whole numbers for priorities, got {level!r}")
    parts = np.array([section.number(level) for level in levels])
    if not parts.sum() > 0:
        raise BadInput(f"{section.where}: expected parts that add up to more than 0")
    drawn = stream(seed, "priorities").choice(len(levels), size=count, p=parts / parts.sum())
    return [levels[k] for k in drawn]


def _contest(section: Section, seed: int) -> Trace:
    keys = section.section("contest")
    keys.only(("X", "T", "lengths", "tokenizer", "dispatch"))
    lengths: Optional[str] = keys.text("lengths") if "lengths" in keys else None
    tokenizer: Optional[str] = keys.text("tokenizer") if "tokenizer" in keys else None
    X, T = keys.positive("X"), keys.positive("T")
    return contest(X, T, seed, lengths, keys.number("dispatch", 0.0), tokenizer)


def _mix(section: Section, seed: int) -> Trace:
    """Return several workloads at once, each with chance of its own."""
    parts = section.values["mix"]
    if not isinstance(parts, (list, tuple)) or not parts:
        raise section.bad("mix", "a list of workloads")
    seeds = stream(seed, "mix").integers(2**31, size=len(parts)).tolist()
    made = [_made(Section(part, f"{section.where}.mix[{k}]"), seeds[k]) for k, part in enumerate(parts)]
    return merge(made, source=f"workload seed={seed}")
