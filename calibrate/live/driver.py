"""A live run: the engine loop with a real clock and a backend that computes.

It runs next to the device: Python 3.9, standard library, numpy. Times are seconds since the run began. The clock is
read once a step: a step begins where the last one ended, so that what the host does in between (booking, deciding,
building rows) is inside the step's time, as it is in the simulation.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Union

from servesim.calibrate.device.backend import Backend
from servesim.calibrate.probe.host_overhead import host_of, parts_of
from servesim.config.registry import make_policy
from servesim.core import BadInput, Request, Shape, Stuck
from servesim.core.request import ASKED
from servesim.costs.mapping import cost_from
from servesim.engine.build import build_loop, build_server
from servesim.engine.clocks import PacedClock, VirtualClock, WallClock
from servesim.engine.loop import Observer
from servesim.engine.server import Server
from servesim.engine.shape import NO_PADDING, shape_of
from servesim.engine.step import ModelCall, Step
from servesim.runs.decision_log import Notes

from .block_tables import BlockTables
from .prompts import Prompt, Stories, drawn

LiveClock = Union[WallClock, VirtualClock]
Emit = Callable[[Any], None]

TIMES = (
    "visible", "scheduled", "first_token", "last_token", "finish", "seen",
    "queued", "prefilling", "decoding", "swapped", "evictions", "outcome", "reason",
)  # fmt: skip
WARM = 16  # tokens a request writes in the warm-up
REPORT = 0.5  # seconds between two progress reports, and looks whether to stop


class Live:
    """A scenario on a backend: the engine loop, and what a device needs besides: block ids, prompts, tokens."""

    def __init__(
        self,
        policy: Mapping[str, Any],
        engine: Mapping[str, Any],
        requests: Sequence[Request],
        backend: Backend,
        prompt: Prompt,
        clock: Optional[LiveClock] = None,
        observers: Sequence[Observer] = (),
        watch: Optional[Callable[[Live], bool]] = None,
    ) -> None:
        server = build_server(make_policy(policy), engine)
        pool = server.pool
        blocks = pool.total if server.policy.paged else engine["num_blocks"] - 1
        self.backend = backend
        self.tables = BlockTables(blocks, pool.size, pool.host_total)
        self.stories = Stories(self.tables, prompt)
        self.clock: LiveClock = WallClock() if clock is None else clock
        self.watch = watch  # sees the run now and then, and says whether to stop
        self.stopped = False
        self.calls: list[ModelCall] = []
        self.written: Sequence[int] = ()  # by the rows of the last call
        self._called, self._shape = 0.0, Shape()
        self._looked = 0.0
        seen_by: list[Observer] = [self.tables, self, *observers]
        self.loop = build_loop(server, engine, requests, self.clock, seen_by, compute=self.compute)

    def run(self) -> float:
        """Serve everything, or until told to stop; return the time at which the last call ended."""
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection during the run would look like a slow step
        try:
            self._looked = time.monotonic()
            return self.loop.run(self.stopping)
        finally:
            if collecting:
                gc.enable()

    def compute(self, step: Step) -> None:
        """Run one model call with its copies."""
        backend, tables, server = self.backend, self.tables, self.loop.server
        rows = self.stories.rows(server, step)
        self._shape = shape_of(step, NO_PADDING, server.traits)
        self._called = self.clock.now()
        if tables.leaving or tables.returning:
            out, back = tables.copies()
            if out:
                backend.swap_out(out)
            if back:
                backend.swap_in(back)
        if rows:
            self.written = backend.step(rows)
        else:
            backend.synchronize()
            self.written = []

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        """A plan has been carried out; its call comes next."""

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        if step.calls:
            self.stories.write(self.written)
            self.calls.append(ModelCall(step.start, self._called, now, self._shape))
        self.stories.forget(over)

    def stopping(self) -> bool:
        """Say whether the run is to end here; ask only now and then."""
        if self.watch is None or self.stopped:
            return self.stopped
        present = time.monotonic()
        if present - self._looked >= REPORT:
            self._looked = present
            self.stopped = self.watch(self)
        return self.stopped


def clock_of(pace: Optional[Mapping[str, Any]]) -> WallClock:
    """Return the clock of a device; of a fake one, `pace` is what its steps cost, as profiles write it."""
    return PacedClock(cost_from(pace, "pace")) if pace else WallClock()


def replay(
    backend: Backend, args: Mapping[str, Any], emit: Emit = lambda value: None, clock: Optional[LiveClock] = None
) -> dict[str, Any]:
    """Replay a resolved scenario on a loaded backend; the result is plain JSON. See `arguments` in replay.py."""
    requests = [Request(**dict(zip(ASKED, row))) for row in args["requests"]]
    about = backend.describe()
    check(requests, args["engine"], about, args["context"])
    notes = Notes()
    draw = drawn(args.get("seed", 0), args["vocab"])
    prompts = {request: draw(request) for request in requests}
    observers = (notes,) if args.get("decisions", True) else ()
    clock = clock_of(args.get("pace")) if clock is None else clock
    watch = Watch(emit, args.get("stop"))
    live = Live(args["policy"], args["engine"], requests, backend, prompts.pop, clock, observers, watch)
    parts = warm_up(backend, args, requests[: args.get("warm_up", 0)])
    host = host_of(parts)
    stuck = None
    try:
        live.run()
    except Stuck as error:
        stuck = str(error)
    return {
        "backend": about,
        "stuck": stuck,
        "host": [host.step, host.row, host.prompt, host.token],
        "host_parts": parts,
        **told(live, requests),
        "decisions": notes.rows,
    }


def told(live: Live, requests: Sequence[Request]) -> dict[str, Any]:
    """Return what came of a run."""
    server = live.loop.server
    return {
        "requests": [[r.written, r.arrival, *(getattr(r, name) for name in TIMES)] for r in requests],
        "calls": [call.flat() for call in live.calls],
        "gaps": [server.gaps.seconds.tolist(), server.gaps.seen.tolist()],
        "computed": server.computed,
        "end": live.loop.now,
        "stopped": live.stopped,
        "late": getattr(live.clock, "late", 0.0),
        "blocks_left": len(live.tables.free),
        "blocks": live.tables.total,
    }


def check(requests: Sequence[Request], engine: Mapping[str, Any], about: Mapping[str, Any], context: int) -> None:
    """Refuse what the loaded model cannot run."""
    if about["block_size"] != engine["block_size"]:
        raise BadInput(
            f"engine.block_size: the model was loaded with {about['block_size']}, got {engine['block_size']}"
        )
    for key, least in (("blocks", engine["num_blocks"]), ("host_blocks", engine.get("host_blocks", 0))):
        if about[key] < least:
            raise BadInput(f"engine: {least} {key} wanted, the model was loaded with {about[key]}")
    longest = engine.get("max_model_len") or context
    for request in requests:
        length = min(request.prompt + min(request.output, request.limit), max(longest, request.prompt + 1))
        if length > context + 1:  # the last token is written, never computed
            raise BadInput(f"request {request.id}: {length} tokens, the model is built for {context}")


def warm_up(
    backend: Backend, args: Mapping[str, Any], requests: Sequence[Request]
) -> list[tuple[float, int, int, int]]:
    """Serve some of the requests at once, some tokens each, and forget about it: first calls are slow.

    Return what the host added to the steps of the last such burst.
    """
    parts: list[tuple[float, int, int, int]] = []
    engine = {**args["engine"], "refuse": "always", "front_end": None}
    for _ in range(2 if requests else 0):  # the second one runs warm, and shows what is the host's
        burst = [Request(f"warm-up {r.id}", 0.0, r.prompt, min(WARM, r.output), min(WARM, r.limit)) for r in requests]
        draw = drawn(0, args["vocab"])
        prompts = {request: draw(request) for request in burst}
        live = Live(args["policy"], engine, burst, backend, prompts.pop, observers=(Notes(),))
        with contextlib.suppress(Stuck):  # an engine that livelocks does so again in the run, which says so
            live.run()
        parts = parts_of(live.calls)
    return parts


class Watch:
    """Reports on a run as it goes, and stops it when a file appears."""

    def __init__(self, emit: Emit, stop: Optional[str]) -> None:
        self.emit = emit
        self.stop = stop
        self._before = (0.0, 0)

    def __call__(self, live: Live) -> bool:
        """Say how the run stands; return whether it is to stop."""
        server, (then, written) = live.loop.server, self._before
        present = live.clock.now()
        self._before = (present, server.written)
        self.emit(
            {
                "t": present,
                "waiting": len(server.waiting),
                "running": len(server.running),
                "swapped": len(server.swapped),
                "done": len(server.done),
                "coming": len(live.loop.inbox),
                "tokens_per_s": (server.written - written) / max(present - then, 1e-9),
            }
        )
        return self.stop is not None and os.path.exists(self.stop)
