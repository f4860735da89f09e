"""One simulated run: a scenario in, requests with their times and the figures out."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

from servesim.config.scenario import Scenario
from servesim.core import BadInput, ClientRequest, Request, Stuck
from servesim.costs.device_profile import Profile, load_profile
from servesim.engine.build import build_loop, build_server
from servesim.engine.clocks import Clock
from servesim.engine.loop import Loop, Observer
from servesim.engine.server import Server
from servesim.engine.shape import Padding
from servesim.engine.simulated import SimulatedClock
from servesim.traces.trace import Trace

from .metrics import Measures, lose


@dataclass
class Run:
    """What came of a scenario."""

    scenario: Scenario
    profile: Profile
    requests: Sequence[Request]
    measures: Measures
    server: Server
    calls: int  # model calls
    busy: float  # seconds of them
    end: float  # when the last one ended
    padded_tokens: int  # prompt tokens run beside the live ones
    padded_rows: int  # decode rows run beside the live ones
    outside: list[str] = field(default_factory=list)  # what lay beyond the profile's measured grid
    stuck: Optional[Stuck] = None

    def result(self) -> dict[str, Any]:
        """Return the figures under vLLM's keys, then what only a simulator knows."""
        return {
            **self.measures.as_result(),
            "makespan": self.measures.makespan,
            "evictions": sum(request.evictions for request in self.requests),
            "outcomes": self.measures.outcomes(),
            "model_calls": self.calls,
            "busy_s": self.busy,
            "prompt_tokens_computed": self.server.computed,
            "padded_prompt_tokens": self.padded_tokens,
            "padded_decode_rows": self.padded_rows,
            "mean_seconds": self.measures.where(),
            "outside_profile": self.outside,
            "stuck": None if self.stuck is None else str(self.stuck),
        }


def load_trace(scenario: Scenario) -> Trace:
    """Return the requests that a scenario's trace or workload gives."""
    if scenario.trace is not None:
        from servesim.traces.read.load import load

        file = scenario.trace
        return load(
            file.path, file.format, file.columns, file.limit, file.tokenizer,
            unit=file.unit, sort=file.sort, seed=scenario.seed, window=file.window or (0.0, math.inf),
        )  # fmt: skip
    if scenario.workload is not None:
        from servesim.traces.make.synth import synthesise

        return synthesise(scenario.workload, scenario.seed)
    raise BadInput("scenario: expected a trace or a workload, got neither (try -X 0.5 -T 3000, or --trace FILE)")


def fresh(requests: Sequence[ClientRequest]) -> list[Request]:
    """Return requests for a server, as their clients asked."""
    return [
        Request(
            r.id, r.arrival, r.prompt, r.output, r.limit, r.priority, r.session, r.prefix, r.after, r.delay, r.fails
        )
        for r in requests
    ]


def build(
    scenario: Scenario,
    requests: Sequence[Request],
    clock: Clock,
    observers: Sequence[Observer] = (),
    front_end: float = 0.0,
) -> Loop:
    """Return the engine loop of a scenario; `front_end` is the profile's seconds."""
    engine = scenario.engine.model_dump()
    return build_loop(build_server(scenario.make_policy(), engine), engine, requests, clock, observers, front_end)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector off: a run makes no cycles worth it, and scanning all requests is a tenth of one."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@no_collection()
def simulate(
    scenario: Scenario,
    trace: Optional[Trace] = None,
    observers: Sequence[Observer] = (),
    leaps: bool = True,
    profile: Optional[Profile] = None,
) -> Run:
    """Run a scenario; a livelock of the engine ends the run and is described in `Run.stuck`."""
    profile = load_profile(scenario.profile) if profile is None else profile
    requests = fresh((load_trace(scenario) if trace is None else trace).requests)
    config = scenario.engine
    cold = config.cold_start
    clock = SimulatedClock(
        profile.noisy(scenario.seed) if scenario.noise else profile.cost,
        Padding(config.prefill_gears, scenario.gears(scenario.make_policy())),
        leaps,
        profile.cold_start if cold is None else (cold.prefill, cold.decode),
    )
    loop = build(scenario, requests, clock, observers, profile.front_end)
    return run_loop(loop, clock, scenario, profile, requests)


def run_loop(
    loop: Loop, clock: SimulatedClock, scenario: Scenario, profile: Profile, requests: Sequence[Request]
) -> Run:
    """Run a loop to its end and collect the results."""
    stuck = None
    try:
        loop.run()
    except Stuck as error:
        stuck = error
    server = loop.server
    return Run(
        scenario, profile, requests, measure(scenario, requests, server), server, loop.calls, loop.now - clock.idle,
        loop.now, *clock.padded, profile.outside(clock.largest._asdict()), stuck,
    )  # fmt: skip


def measure(scenario: Scenario, requests: Sequence[Request], server: Server) -> Measures:
    """Return the figures of requests that were served, those marked whose client gave up."""
    if scenario.engine.lost_after is not None:
        lose(requests, scenario.engine.lost_after)
    return Measures(requests, server.gaps, scenario.slo.seconds())
