"""The job `replay` of a worker: warm up a loaded backend, run a scenario on it, and return the result as JSON.

Python 3.9, standard library, numpy.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, Callable, Optional

from servesim.calibrate.client.prompts import Prompts
from servesim.calibrate.device.backend import Backend
from servesim.calibrate.device.counters import DeviceSampler, counters_to_json
from servesim.calibrate.probe.host_overhead import fit_overhead, overhead_samples
from servesim.config.user_code import use_access
from servesim.core import BadInput, Request, Stuck
from servesim.engine.clocks import WallClock
from servesim.engine.kv_cache import CACHE_COUNTS
from servesim.engine.work_totals import work_to_json
from servesim.runs.decision_log import InMemoryLog

from .driver import LiveClock, LiveDriver, make_clock
from .recorded_answers import AnswerRecord, check_answers
from .request_json import requests_from_json
from .token_history import TokenHistory

Emit = Callable[[Any], None]

RESULT_FIELDS = (
    "visible_at", "scheduled", "first_token", "last_token", "finish", "client_end",
    "queued", "prefilling", "decoding", "swapped", "preemptions", "outcome", "reason", "cached_tokens",
)  # fmt: skip
DRAFT_COUNTS = ("rows", "drafted", "accepted_at", "lost")
WARM_UP_TOKENS = 32  # maximum output length of a warm-up request


def replay(
    backend: Backend, args: Mapping[str, Any], emit: Emit = lambda value: None, clock: Optional[LiveClock] = None
) -> dict[str, Any]:
    """Run a resolved scenario on a loaded backend; the result is JSON. `replay_arguments` in setup.py makes `args`."""
    requests = requests_from_json(args["requests"])
    about = backend.describe()
    check_fits(requests, args["engine"], about, args["context"])
    notes = InMemoryLog()
    prompts = make_prompts(requests, args.get("seed", 0), args["vocab"])
    observers = (notes,) if args.get("decisions", True) else ()
    clock = make_clock(args.get("pace")) if clock is None else clock
    monitor = run_monitor(emit, args)
    history, record, count = TokenHistory(prompts.pop), None, args.get("check_tokens")
    if count is not None:
        history = record = AnswerRecord(prompts.pop, backend, requests, count, args["vocab"], args.get("seed", 0))
    with use_access(args.get("code")):  # as in the parent process
        live = LiveDriver(args["policy"], args["engine"], requests, backend, history, clock, observers, monitor)
    stuck, sampler = None, DeviceSampler()
    with sampler if isinstance(clock, WallClock) else contextlib.nullcontext():
        with use_access(args.get("code")):
            warm = warm_up(backend, args, requests[: args.get("warm_up", 0)])
        try:
            live.run()
        except Stuck as error:
            stuck = str(error)
    recorded = None if live.stopped else record
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
        "token_check": recorded and check_answers(backend, recorded, emit, lambda: stop_asked(args)),
    }


def make_prompts(requests: Sequence[Request], seed: int, vocab: int) -> dict[Request, list[int]]:
    """Return the prompts of a run. They are made before it: that would be measured as host time."""
    prompts = Prompts(str(seed), vocab)
    return {request: prompts.token_ids(request) for request in requests}


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
        **drafts_result(live, requests),
    }


def drafts_result(live: LiveDriver, requests: Sequence[Request]) -> dict[str, Any]:
    """Return what was drafted and accepted, as JSON; by request, the rows of `LiveDrafts.log`."""
    counts, log = live.loop.server.drafts, live.history.drafts
    if counts is None or log is None:
        return {}
    rows = {str(request.id): log.log.get(request.id, []) for request in requests}
    return {"drafts": {**{name: getattr(counts, name) for name in (*DRAFT_COUNTS, "accepted")}, "requests": rows}}


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
    width = 1 + args["policy"].get("num_speculative_tokens", 0)  # most tokens of a request in a step
    lengths = [1 + width * (index % WARM_UP_TOKENS) for index in range(len(requests))]
    for _ in range(2 if requests else 0):
        burst = [
            Request(
                f"warm-up {r.id}", 0.0, r.prompt, min(length, r.output), min(length, r.limit), acceptance=r.acceptance
            )
            for length, r in zip(lengths, requests)
        ]
        prompts = make_prompts(burst, 0, args["vocab"])
        history = TokenHistory(prompts.pop)
        live = LiveDriver(
            args["policy"], engine, burst, backend, history, None, (InMemoryLog(),), lambda _: stop_asked(args)
        )
        with contextlib.suppress(Stuck):  # a stuck engine gets stuck in the run again, which reports it
            live.run()
    return live


def stop_asked(args: Mapping[str, Any]) -> bool:
    """Return whether the stop file of a replay exists, or its time is over."""
    over = time.monotonic() > args.get("until", math.inf)
    return over or (args.get("stop") is not None and os.path.exists(args["stop"]))


def run_monitor(emit: Emit, args: Mapping[str, Any]) -> Callable[[LiveDriver], bool]:
    """Return the monitor of a run: it reports the progress, and stops the run when the stop file exists."""
    last_time, last_written = 0.0, 0

    def report(live: LiveDriver) -> bool:
        nonlocal last_time, last_written
        server, now = live.loop.server, live.clock.now()
        rate = (server.tokens_generated - last_written) / max(now - last_time, 1e-9)
        last_time, last_written = now, server.tokens_generated
        counts = {name: len(getattr(server, name)) for name in ("waiting", "running", "swapped")}
        emit({"t": now, **counts, "done": len(server.done or ()), "tokens_per_s": rate})
        return stop_asked(args)

    return report
