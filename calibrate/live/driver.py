"""A live run: the engine loop with a real clock and a backend that computes.

It runs in the worker: Python 3.9, standard library, numpy. Times are seconds since the start of the run. The clock is
read once per step: a step starts at the end of the last one. So a step's time includes the host overhead (scheduling,
block tables, building rows), as in the simulation. With asynchronous scheduling, a step is launched while the one
before it runs. It then starts at the end of that one, and its time includes only the overhead that lasts longer.
"""

from __future__ import annotations

import gc
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Union

from servesim.calibrate.device.backend import Backend
from servesim.calibrate.probe.host_overhead import HostSample, host_sample
from servesim.config.registry import make_policy
from servesim.config.user_code import user_errors
from servesim.core import BadInput, Request, Shape
from servesim.costs.mapping import cost_from
from servesim.engine.build import build_loop, build_server
from servesim.engine.clocks import PacedClock, VirtualClock, WallClock
from servesim.engine.notices import Observer
from servesim.engine.prefix_cache import PrefixCache
from servesim.engine.server import Server
from servesim.engine.shape import NO_PADDING, step_shape
from servesim.engine.step import Step
from servesim.files.step_table import ModelCall

from .block_tables import BlockTables
from .live_drafts import live_drafts
from .shared_blocks import SharedBlockTables
from .token_history import TokenHistory

LiveClock = Union[WallClock, VirtualClock]

REPORT_INTERVAL_S = 0.5  # seconds between two progress reports; the stop file is checked as often


class LaunchedCall:
    """A model call that has not been recorded: when the backend was called, its shape, and its tokens, one per row."""

    __slots__ = ("called", "failed", "shape", "tokens")

    def __init__(self, called: float, shape: Shape) -> None:
        self.called = called
        self.shape = shape
        self.tokens: Optional[Sequence[int]] = None  # None while the call is in flight
        self.failed = False


class LiveDriver:
    """Runs a scenario on a backend: the engine loop, with block ids, prompts and tokens for the device."""

    def __init__(
        self,
        policy: Mapping[str, Any],
        engine: Mapping[str, Any],
        requests: Sequence[Request],
        backend: Backend,
        history: TokenHistory,
        clock: Optional[LiveClock] = None,
        observers: Sequence[Observer] = (),
        monitor: Optional[Callable[[LiveDriver], bool]] = None,
    ) -> None:
        if engine.get("data_parallel_size", 1) > 1:
            raise BadInput("engine.data_parallel_size: expected 1, a live run has one rank")
        scheduler = make_policy(policy)
        with user_errors(scheduler):
            server = build_server(scheduler, engine)
        server.done = []
        self.backend = backend
        self.tables = block_tables(server, engine["num_blocks"])
        self.history = history
        self.clock: LiveClock = WallClock() if clock is None else clock
        self.monitor = monitor  # called every REPORT_INTERVAL_S; returns whether to stop
        self.stopped = False
        self.calls: list[ModelCall] = []
        self.launched: deque[LaunchedCall] = deque()
        self.host_parts: list[HostSample] = []  # of launched calls
        self._host_ready = 0.0  # when the last call had been launched
        self._checked_at = 0.0
        all_observers: list[Observer] = [self.tables, self, *observers]
        self.overlaps = server.rules.steps_in_flight > 1
        if server.rules.stages > 1:
            raise BadInput(f"policy: a live run has one stage, got pipeline_parallel_size {server.rules.stages}")
        if server.rules.steps_in_flight > backend.max_steps_in_flight:
            raise BadInput(
                f"policy: asynchronous scheduling has {server.rules.steps_in_flight} steps in flight, this backend "
                f"({backend.name}, sampling {backend.sampling}) has at most {backend.max_steps_in_flight}; "
                "set async_scheduling: false"
            )
        if server.drafts is not None:
            if engine.get("chances") is not None:
                server.drafts.connect(*engine["chances"])
            method = getattr(scheduler, "speculative_method", "")
            self.history.drafts = live_drafts(server.drafts, server.rules.steps_in_flight, backend, method)
            server.drafts.accept, server.drafts.offer = self._accepted, self._guess
        self.loop = build_loop(server, engine, requests, self.clock, all_observers, self)

    def run(self) -> float:
        """Run until all requests are finished or the monitor stops the run; return the end time of the last call."""
        gc_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # a garbage collection during a step would be measured as device time
        try:
            self._checked_at = time.monotonic()
            with user_errors(self.loop.policy):
                return self.loop.run(self.should_stop)
        finally:
            self.collect_all()
            if gc_enabled:
                gc.enable()

    def compute(self, step: Step) -> None:
        """Run one model call, after the copies of its swapped blocks. With asynchronous scheduling, only launch it."""
        backend, tables, server = self.backend, self.tables, self.loop.server
        rows = self.history.rows(server, step, tables)
        call = LaunchedCall(self.clock.now(), step_shape(step, NO_PADDING, server.rules))
        self.launched.append(call)
        if tables.copies_out:
            backend.swap_out(tables.copies_out)
            tables.copies_out = []
        if tables.copies_in:
            backend.swap_in(tables.copies_in)
            tables.copies_in = []
        if self.overlaps:
            backend.launch(rows)
            ready = self.clock.now()
            self.host_parts.append(host_sample(ready - max(step.decided, self._host_ready), call.shape))
            self._host_ready = ready
        elif rows:
            call.tokens = backend.step(rows)
        else:
            backend.synchronize()
            call.tokens = []

    def collect(self, step: Step) -> None:
        """Wait for the oldest call in flight, which is that of this step."""
        call = self.launched[0]
        if call.tokens is None:
            call.tokens = self.backend.collect()

    def collect_all(self) -> None:
        """Wait for the calls that are in flight after a run was stopped. Their tokens are not used."""
        while self.launched:
            if self.launched.popleft().tokens is None:
                self.backend.collect()

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        """Drop the tokens of rejected requests, and those in flight of preempted ones that are computed again."""
        if step.has_moves:
            self.history.drop([rejection.request for rejection in step.plan.moves.reject])
        if step.preempted and server.rules.drops_tokens_in_flight:
            self.history.drop_in_flight([request for request, _, _ in step.preempted])

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        if step.runs_model:
            self._append_tokens()
            call = self.launched.popleft()
            self.calls.append(ModelCall(step.start, max(step.start, call.called), now, call.shape))
        self.history.drop(finished)

    def _append_tokens(self) -> None:
        """Give the tokens of the oldest call to the requests. With drafts, the engine asks for them earlier."""
        if self.history.in_flight:
            tokens = self.launched[0].tokens
            assert tokens is not None
            self.history.append(tokens)

    def _accepted(self, request: Request, count: int) -> int:
        """Return how many drafts of a request the device has accepted."""
        self._append_tokens()
        assert self.history.drafts is not None
        return self.history.drafts.accepted[request]

    def _guess(self, request: Request) -> int:
        """Guess the next tokens of a request; return how many."""
        self._append_tokens()
        assert self.history.drafts is not None
        return self.history.drafts.guess(request, self.history.tokens[request])

    def should_stop(self) -> bool:
        """Return whether to stop the run. The monitor is called at most once per REPORT_INTERVAL_S."""
        if self.monitor is None or self.stopped:
            return self.stopped
        now = time.monotonic()
        if now - self._checked_at >= REPORT_INTERVAL_S:
            self._checked_at = now
            self.stopped = self.monitor(self)
        return self.stopped


def block_tables(server: Server, num_blocks: int) -> BlockTables:
    """Return the block tables of a server. A policy that does not count blocks uses all but the padding block."""
    if isinstance(server.prefix_cache, PrefixCache):
        return SharedBlockTables(server.prefix_cache)
    if refusal := server.rules.live_refusal():
        raise BadInput(refusal)
    if server.kv_cache_groups:
        why = "a live run stores all layers in full"
        raise BadInput(f"engine.kv_cache_groups: expected [null]: {why}, got {json.dumps(server.kv_cache_groups)}")
    pool = server.pool
    blocks = pool.total if server.policy.uses_block_pool else num_blocks - 1
    return BlockTables(blocks, pool.block_size, pool.host_total)


def make_clock(pace: Optional[Mapping[str, Any]]) -> WallClock:
    """Return a wall clock; for a fake backend, `pace` is its cost model as in a profile."""
    return PacedClock(cost_from(pace, "pace")) if pace else WallClock()
