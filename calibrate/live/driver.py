"""A live run: the engine loop with a real clock and a backend that computes.

It runs in the worker: Python 3.9, standard library, numpy. Times are seconds since the start of the run. The clock is
read once per step: a step starts at the end of the last one. So a step's time includes the host overhead (scheduling,
block tables, building rows), as in the simulation. With asynchronous scheduling, a step is launched while the one
before it runs. It then starts at the end of that one, and its time includes only the overhead that lasts longer.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Callable, Optional, Union

from servesim.calibrate.device.backend import Backend
from servesim.calibrate.device.counters import DeviceSampler, counters_to_json
from servesim.calibrate.probe.host_overhead import (
    HostSample,
    fit_overhead,
    host_sample,
    overhead_samples,
)
from servesim.config.registry import make_policy
from servesim.config.user_code import use_access, user_errors
from servesim.core import BadInput, Request, Shape, Stuck
from servesim.core.content import content_of_pieces
from servesim.core.request import CLIENT_FIELDS
from servesim.costs.mapping import cost_from
from servesim.engine.clocks import PacedClock, VirtualClock, WallClock
from servesim.engine.loop import Observer, build_loop, build_server
from servesim.engine.prefix_cache import PrefixCache
from servesim.engine.server import Server
from servesim.engine.shape import NO_PADDING, step_shape
from servesim.engine.step import ModelCall, Step
from servesim.engine.work_totals import work_to_json
from servesim.runs.decision_log import InMemoryLog

from .block_tables import BlockTables
from .recorded_answers import AnswerRecord, check_answers
from .shared_blocks import SharedBlockTables
from .token_history import PromptMaker, TokenHistory, prompt_maker

LiveClock = Union[WallClock, VirtualClock]
Emit = Callable[[Any], None]

RESULT_FIELDS = (
    "visible_at", "scheduled", "first_token", "last_token", "finish", "client_end",
    "queued", "prefilling", "decoding", "swapped", "preemptions", "outcome", "reason", "cached_tokens",
)  # fmt: skip
CACHE_COUNTS = (
    "requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits", "evicted_blocks",
)  # fmt: skip
WARM_UP_TOKENS = 32  # maximum output length of a warm-up request
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
        make_prompt: PromptMaker,
        clock: Optional[LiveClock] = None,
        observers: Sequence[Observer] = (),
        monitor: Optional[Callable[[LiveDriver], bool]] = None,
        make_history: Callable[[BlockTables, PromptMaker], TokenHistory] = TokenHistory,
    ) -> None:
        if engine.get("data_parallel_size", 1) > 1:
            raise BadInput("engine.data_parallel_size: expected 1, a live run has one rank")
        scheduler = make_policy(policy)
        with user_errors(scheduler):
            server = build_server(scheduler, engine)
        self.backend = backend
        self.tables = block_tables(server, engine["num_blocks"])
        self.history = make_history(self.tables, make_prompt)
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
        check_steps_in_flight(server.rules.steps_in_flight, backend)
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
        rows = self.history.rows(server, step)
        call = LaunchedCall(self.clock.now(), step_shape(step, NO_PADDING, server.rules))
        self.launched.append(call)
        if tables.copies_out or tables.copies_in:
            copies_out, copies_in = tables.take_copies()
            if copies_out:
                backend.swap_out(copies_out)
            if copies_in:
                backend.swap_in(copies_in)
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
        """Drop the tokens in flight of preempted requests, in an engine that computes them again."""
        if step.preempted and server.rules.drops_tokens_in_flight:
            self.history.drop_in_flight([request for request, _, _ in step.preempted])

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        if step.runs_model:
            call = self.launched.popleft()
            assert call.tokens is not None
            self.history.append(call.tokens)
            self.calls.append(ModelCall(step.start, max(step.start, call.called), now, call.shape))
        self.history.drop(finished)

    def should_stop(self) -> bool:
        """Return whether to stop the run. The monitor is called at most once per REPORT_INTERVAL_S."""
        if self.monitor is None or self.stopped:
            return self.stopped
        now = time.monotonic()
        if now - self._checked_at >= REPORT_INTERVAL_S:
            self._checked_at = now
            self.stopped = self.monitor(self)
        return self.stopped


def check_steps_in_flight(steps: int, backend: Backend) -> None:
    """Raise BadInput if a policy needs more steps in flight than a backend can have."""
    if steps > backend.max_steps_in_flight:
        raise BadInput(
            f"policy: asynchronous scheduling has {steps} steps in flight, this backend ({backend.name}, sampling "
            f"{backend.sampling}) has at most {backend.max_steps_in_flight}; set async_scheduling: false"
        )


def block_tables(server: Server, num_blocks: int) -> BlockTables:
    """Return the block tables of a server. A policy that does not count blocks uses all but the padding block."""
    if isinstance(server.prefix_cache, PrefixCache):
        return SharedBlockTables(server.prefix_cache)
    if refusal := server.rules.live_refusal():
        raise BadInput(refusal)
    pool = server.pool
    blocks = pool.total if server.policy.uses_block_pool else num_blocks - 1
    return BlockTables(blocks, pool.block_size, pool.host_total)


def make_clock(pace: Optional[Mapping[str, Any]]) -> WallClock:
    """Return a wall clock; for a fake backend, `pace` is its cost model as in a profile."""
    return PacedClock(cost_from(pace, "pace")) if pace else WallClock()


def replay(
    backend: Backend, args: Mapping[str, Any], emit: Emit = lambda value: None, clock: Optional[LiveClock] = None
) -> dict[str, Any]:
    """Run a resolved scenario on a loaded backend; the result is JSON. `replay_arguments` in setup.py makes `args`."""
    requests = requests_from_json(args["requests"])
    about = backend.describe()
    check_fits(requests, args["engine"], about, args["context"])
    notes = InMemoryLog()
    make_prompt = prompt_maker(args.get("seed", 0), args["vocab"])
    prompts = {request: make_prompt(request) for request in requests}
    observers = (notes,) if args.get("decisions", True) else ()
    clock = make_clock(args.get("pace")) if clock is None else clock
    monitor = RunMonitor(emit, args)
    history = history_maker(args, backend, requests)
    with use_access(args.get("code")):  # as in the parent process
        live = LiveDriver(
            args["policy"], args["engine"], requests, backend, prompts.pop, clock, observers, monitor, history
        )
    stuck, sampler = None, DeviceSampler()
    with sampler if isinstance(clock, WallClock) else contextlib.nullcontext():
        with use_access(args.get("code")):
            warm = warm_up(backend, args, requests[: args.get("warm_up", 0)])
        try:
            live.run()
        except Stuck as error:
            stuck = str(error)
    overhead = [] if warm is None else warm.host_parts if warm.overlaps else overhead_samples(warm.calls)
    return {
        "backend": about,
        "stuck": stuck,
        "host": astuple(fit_overhead(overhead)),
        "host_parts": overhead,
        "warm_up_calls": [] if warm is None else [call.flat() for call in warm.calls],
        **run_result(live, requests),
        "counters": counters_to_json(sampler, getattr(clock, "origin", 0.0)),
        "decisions": notes.rows,
        "token_check": check_tokens(live, emit, args),
    }


def requests_from_json(rows: Iterable[Sequence[Any]]) -> list[Request]:
    """Return unserved requests; `request_to_json` in setup.py writes the rows."""
    requests = []
    for row in rows:
        fields = dict(zip(CLIENT_FIELDS, row))
        content = fields["content"]
        fields["content"] = content_of_pieces(content["pieces"], content["answer"]) if content else None
        requests.append(Request(**fields))
    return requests


def history_maker(
    args: Mapping[str, Any], backend: Backend, requests: Sequence[Request]
) -> Callable[[BlockTables, PromptMaker], TokenHistory]:
    """Return what makes the token history of a run. With a token check, it also records answers."""
    count = args.get("check_tokens")
    if count is None:
        return TokenHistory
    return lambda tables, make_prompt: AnswerRecord(
        tables, make_prompt, backend, requests, count, args["vocab"], args.get("seed", 0)
    )


def check_tokens(live: LiveDriver, emit: Emit, args: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """Run the recorded answers of a finished run again, alone; None without a record."""
    if not isinstance(live.history, AnswerRecord) or live.stopped:
        return None
    return check_answers(live.backend, live.history, emit, lambda: stop_asked(args))


def run_result(live: LiveDriver, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the result of a run as JSON."""
    server = live.loop.server
    cache = server.prefix_cache
    return {
        "requests": [[r.written, r.sent, *(getattr(r, name) for name in RESULT_FIELDS)] for r in requests],
        "calls": [call.flat() for call in live.calls],
        "gaps": [server.token_gaps.seconds.tolist(), server.token_gaps.counts.tolist()],
        "work": work_to_json(server.work.by_kind()),
        "prefix_cache": None if cache is None else {name: getattr(cache.stats, name) for name in CACHE_COUNTS},
        "end": live.loop.now,
        "stopped": live.stopped,
        "late": getattr(live.clock, "late", 0.0),
        "blocks_left": live.tables.free_count,
        "blocks": live.tables.total,
    }


def check_fits(requests: Sequence[Request], engine: Mapping[str, Any], about: Mapping[str, Any], context: int) -> None:
    """Raise BadInput if the loaded model cannot run the scenario."""
    if about["block_size"] != engine["block_size"]:
        raise BadInput(
            f"engine.block_size: expected {about['block_size']}, as the model was loaded, got {engine['block_size']}"
        )
    for key, needed in (("blocks", engine["num_blocks"]), ("host_blocks", engine.get("host_blocks", 0))):
        if about[key] < needed:
            raise BadInput(f"engine: {needed} {key} needed, the model was loaded with {about[key]}")
    max_length = engine.get("max_model_len") or context
    for request in requests:
        length = min(request.prompt + min(request.output, request.limit), max(max_length, request.prompt + 1))
        if length > context + 1:  # the last token is generated, but never an input
            raise BadInput(
                f"request {request.id}: expected at most {context} tokens (the model's context), got {length}"
            )


def warm_up(backend: Backend, args: Mapping[str, Any], requests: Sequence[Request]) -> Optional[LiveDriver]:
    """Serve these requests as two bursts: the first calls are slow. Return the second burst.

    Its steps show the host overhead, and what overlaps with steps in flight. The answers get shorter one by one, so
    that there are steps of every number of rows.
    """
    live = None
    engine = {**args["engine"], "reject_oversized": "always", "front_end": None}
    lengths = [1 + index % WARM_UP_TOKENS for index in range(len(requests))]
    for _ in range(2 if requests else 0):
        burst = [
            Request(f"warm-up {r.id}", 0.0, r.prompt, min(length, r.output), min(length, r.limit))
            for length, r in zip(lengths, requests)
        ]
        make_prompt = prompt_maker(0, args["vocab"])
        prompts = {request: make_prompt(request) for request in burst}
        live = LiveDriver(
            args["policy"], engine, burst, backend, prompts.pop, None, (InMemoryLog(),), lambda _: stop_asked(args)
        )
        with contextlib.suppress(Stuck):  # a stuck engine gets stuck in the run again, which reports it
            live.run()
    return live


def stop_asked(args: Mapping[str, Any]) -> bool:
    """Return whether the stop file of a replay exists."""
    return args.get("stop") is not None and os.path.exists(args["stop"])


class RunMonitor:
    """Reports the progress of a run, and stops it when the stop file exists."""

    def __init__(self, emit: Emit, args: Mapping[str, Any]) -> None:
        self.emit = emit
        self.args = args
        self._last_report = (0.0, 0)  # time, tokens generated

    def __call__(self, live: LiveDriver) -> bool:
        """Report the progress of the run; return whether to stop it."""
        server, (last_time, last_written) = live.loop.server, self._last_report
        now = live.clock.now()
        self._last_report = (now, server.tokens_generated)
        self.emit(
            {
                "t": now,
                "waiting": len(server.waiting),
                "running": len(server.running),
                "swapped": len(server.swapped),
                "done": len(server.done),
                "coming": len(live.loop.inbox),
                "tokens_per_s": (server.tokens_generated - last_written) / max(now - last_time, 1e-9),
            }
        )
        return stop_asked(self.args)
