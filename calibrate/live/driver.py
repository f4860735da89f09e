"""The live clock around the driver: a step runs on a backend and takes what it takes. Sibling of sim/engine.py.

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
from typing import Any, Callable, Optional

from servesim.calibrate.device.backend import Backend
from servesim.calibrate.probe.host_overhead import host_of, parts_of
from servesim.config.registry import make_policy
from servesim.core import BadInput, Request, Shape, Stuck
from servesim.core.request import ASKED
from servesim.engine.build import build_driver, build_server
from servesim.engine.loop import Driver, Observer
from servesim.engine.shape import NO_PADDING, shape_of
from servesim.engine.step import Step
from servesim.runs.decision_log import Notes

from .block_tables import BlockTables
from .clocks import WallClock, clock_of
from .prompts import Stories, drawn

Emit = Callable[[Any], None]

TIMES = (
    "visible", "scheduled", "first_token", "last_token", "finish", "seen",
    "queued", "prefilling", "decoding", "swapped", "evictions", "outcome", "reason",
)  # fmt: skip
WARM = 16  # tokens a request writes in the warm-up
REPORT = 0.5  # seconds between two progress reports, and looks whether to stop


class Live:
    """Runs a driver to the end of its inbox on a backend."""

    def __init__(
        self,
        driver: Driver,
        backend: Backend,
        tables: BlockTables,
        stories: Stories,
        clock: Optional[WallClock] = None,
        watch: Optional[Callable[[Live], bool]] = None,
    ) -> None:
        self.driver = driver
        self.backend = backend
        self.tables = tables
        self.stories = stories
        self.clock = WallClock() if clock is None else clock
        self.watch = watch  # told of the run every so often; says whether to stop
        self.now = 0.0
        self.stopped = False
        # one a model call: when it was begun, when the backend was called, when it had ended, its shape
        self.calls: list[tuple[float, float, float, Shape]] = []
        self.written: Sequence[int] = ()  # by the rows of the last call
        self._looked = 0.0

    def run(self) -> float:
        """Serve everything, or until told to stop; return the instant at which the last call ended."""
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection in mid-run would be taken for a slow step
        try:
            self.now = self.clock.start()
            self._looked = time.monotonic()
            self._serve()
        finally:
            if collecting:
                gc.enable()
        return self.now

    def _serve(self) -> None:
        driver, clock = self.driver, self.clock
        while not self.stopping():
            step = driver.begin(self.now)
            if step is None:
                instant = driver.next_event()
                if instant is None:
                    return
                self.now = clock.wait(instant, self.stopping)
                continue
            self.now = self.call(step)
            self.stories.forget(driver.end(step, self.now))

    def call(self, step: Step) -> float:
        """Run one model call with its copies; return when it had ended."""
        backend, tables = self.backend, self.tables
        rows = self.stories.rows(self.driver.server, step)
        shape = shape_of(step, NO_PADDING, self.driver.policy.last_token_decodes)
        called = self.clock.now()
        if tables.leaving or tables.returning:
            out, back = tables.copies()
            if out:
                backend.swap_out(out)
            if back:
                backend.swap_in(back)
        if rows:
            tokens = backend.step(rows)
        else:
            backend.synchronize()
            tokens = []
        end = self.clock.after(shape)
        self.written = tokens
        self.stories.write(tokens)
        self.calls.append((step.start, called, end, shape))
        return end

    def stopping(self) -> bool:
        """Say whether the run is to end here; look around only every now and then."""
        if self.watch is None or self.stopped:
            return self.stopped
        present = time.monotonic()
        if present - self._looked >= REPORT:
            self._looked = present
            self.stopped = self.watch(self)
        return self.stopped


def assemble(policy: Mapping[str, Any], engine: Mapping[str, Any], requests: Sequence[Request],
             observers: Sequence[Observer] = ()) -> tuple[Driver, BlockTables]:  # fmt: skip
    """Return the driver of a resolved scenario, with the block tables among its observers."""
    server = build_server(make_policy(policy), engine)
    pool = server.pool
    blocks = pool.total if server.policy.paged else engine["num_blocks"] - 1
    tables = BlockTables(blocks, pool.size, pool.host_total)
    return build_driver(server, engine, requests, (tables, *observers)), tables


def replay(
    backend: Backend, args: Mapping[str, Any], emit: Emit = lambda value: None, clock: Optional[WallClock] = None
) -> dict[str, Any]:
    """Replay a resolved scenario on a loaded backend; the result is plain JSON. See `arguments` in replay.py."""
    requests = [Request(**dict(zip(ASKED, row))) for row in args["requests"]]
    about = backend.describe()
    check(requests, args["engine"], about, args["context"])
    notes = Notes()
    driver, tables = assemble(args["policy"], args["engine"], requests, (notes,) if args.get("decisions", True) else ())
    draw = drawn(args.get("seed", 0), args["vocab"])
    stories = Stories(tables, {request: draw(request) for request in requests}.pop)
    parts = warm_up(backend, args, requests[: args.get("warm_up", 0)])
    host = host_of(parts)
    clock = clock_of(args.get("pace")) if clock is None else clock
    live = Live(driver, backend, tables, stories, clock, Watch(emit, args.get("stop")))
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
    server = live.driver.server
    return {
        "requests": [[r.written, r.arrival, *(getattr(r, name) for name in TIMES)] for r in requests],
        "calls": [[start, called, end, *shape] for start, called, end, shape in live.calls],
        "gaps": [server.gaps.seconds.tolist(), server.gaps.seen.tolist()],
        "computed": server.computed,
        "end": live.now,
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
        driver, tables = assemble(args["policy"], engine, burst, (Notes(),))
        draw = drawn(0, args["vocab"])
        live = Live(driver, backend, tables, Stories(tables, {request: draw(request) for request in burst}.pop))
        with contextlib.suppress(Stuck):  # an engine that livelocks does so again in the run, which says so
            live.run()
        parts = parts_of([[start, called, end, *shape] for start, called, end, shape in live.calls])
    return parts


class Watch:
    """Reports on a run as it goes, and stops it when a file appears."""

    def __init__(self, emit: Emit, stop: Optional[str]) -> None:
        self.emit = emit
        self.stop = stop
        self._before = (0.0, 0)

    def __call__(self, live: Live) -> bool:
        """Say how the run stands; return whether it is to stop."""
        server, (then, written) = live.driver.server, self._before
        present = live.clock.now()
        self._before = (present, server.written)
        self.emit(
            {
                "t": present,
                "waiting": len(server.waiting),
                "running": len(server.running),
                "swapped": len(server.swapped),
                "done": len(server.done),
                "coming": len(live.driver.inbox),
                "tokens_per_s": (server.written - written) / max(present - then, 1e-9),
            }
        )
        return self.stop is not None and os.path.exists(self.stop)
