"""The timeline of a run for Perfetto (ui.perfetto.dev) or chrome://tracing, in the JSON form of trace events.

Steps are slices on one track; each replica of a fleet has its own, with its own counters. Every request is an async
slice from its arrival to its end, with its states inside. Queues, blocks and the hits of the prefix cache are counters.
Times are microseconds. `Timeline` and `QueueLog` are observers of a simulated run; `write_measured_timeline` writes
that of a measured run from its model calls, requests and device counters.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Optional, TextIO, TypeVar, Union

from servesim.core import FOREVER, Request
from servesim.engine.server import Server
from servesim.engine.shape import runs_as_decode
from servesim.engine.step import Step
from servesim.files.step_table import ModelCall
from servesim.files.write import open_text

from .utilisation import MEMORY, MEMORY_BUSY, POWER, TIME, UTILISATION, Rows

FileType = TypeVar("FileType", bound="TraceFile")
ENGINE, REQUESTS, DEVICE, REPLICAS = 1, 2, 3, 4  # process ids: groups in the viewer; the last is that of replica 0


class TraceFile:
    """A file of trace events; a context manager. `replicas` are the names of those of a fleet."""

    def __init__(self, path: Union[str, Path], replicas: Sequence[str] = ()) -> None:
        self.path = path
        self.groups = {name: REPLICAS + number for number, name in enumerate(replicas)} or {"": ENGINE}
        self.events = 0
        self._stack = ExitStack()
        self._file: Optional[TextIO] = None

    def __enter__(self: FileType) -> FileType:
        self._file = self._stack.enter_context(open_text(self.path))
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
        names = {group: name or "engine" for name, group in self.groups.items()}
        for order, (group, name) in enumerate([*names.items(), (REQUESTS, "requests")], 1):
            self.name_group(group, name, order)
        for group in names:
            self.event("M", 0.0, group, "thread_name", tid=1, args={"name": "steps"})
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and self._file is not None:
            self.write_end()
            self._file.write("\n]}\n")
        self._stack.__exit__(kind, error, trace)

    def write_end(self) -> None:
        """Write the last events."""

    def name_group(self, group: int, name: str, order: int) -> None:
        """Name a group of tracks, and give it a place among all groups."""
        self.event("M", 0.0, group, "process_name", args={"name": name})
        self.event("M", 0.0, group, "process_sort_index", args={"sort_index": order})

    def slice(self, phase: str, request: Request, name: str, at: float, facts: Any = None) -> None:
        """Write the beginning (b) or the end (e) of a slice of a request."""
        self.event(phase, at, REQUESTS, name, cat="request", id=str(request.id), args=facts or {})

    def event(self, phase: str, at: float, group: int, name: str, tid: int = 0, **extra: Any) -> None:
        """Write an event."""
        assert self._file is not None, "a timeline is written inside its with-block"
        event = {"ph": phase, "ts": microseconds(at), "pid": group, "tid": tid, "name": name, **extra}
        self._file.write(("," if self.events else "") + "\n" + json.dumps(event, separators=(",", ":")))
        self.events += 1


class Timeline(TraceFile):
    """Writes the events of a run during the run; an observer of the loop."""

    def __init__(self, path: Union[str, Path], replicas: Sequence[str] = ()) -> None:
        super().__init__(path, replicas)
        self._states: dict[Request, str] = {}  # open state slice of each request
        self._counters: dict[tuple[int, str], dict[str, float]] = {}  # last values written, by group and name
        self._prompts: dict[Step, list[int]] = {}  # tokens of the prompts of steps in flight
        self._drafts: dict[Server, tuple[int, int]] = {}  # verified and accepted so far
        self._without_kv: list[Request] = []  # their KV is copied from another replica
        self._now = 0.0

    def write_end(self) -> None:
        """Close the slices of unfinished requests."""
        for request in list(self._states):
            self._close(request, self._now if request.client_end is None else request.client_end)

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        now = self._now = step.decided
        prompts = [c for c in step.chunks if server.drafts is None or not runs_as_decode(c, server.rules)]
        self._prompts[step] = [chunk.tokens - chunk.drafts for chunk in prompts]
        for request in arrived:
            self._open(request, now, server.name)
        if self._without_kv:
            self._note_copies(now)
        for request, how, _ in step.preempted:
            self._enter(request, {"swap": "swapped out", "keep": "paused"}.get(how, "queued again"), now)
        for request, _ in step.admitted:
            self._enter(request, "prefill", now)
        for request in step.plan.moves.swap_in:
            self._enter(request, "decode", now)
        for rejection in step.plan.moves.reject:
            self._close(rejection.request, now)
        self._count(server, now)

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        self._now, tokens = now, self._prompts.pop(step)
        if step.runs_model:
            facts = {"prompts": len(tokens), "prompt_tokens": sum(tokens),
                     "decodes": step.decode_rows + len(step.chunks) - len(tokens), "context": step.context,
                     "preempted": len(step.preempted), **self._draft_facts(server)}  # fmt: skip
            duration = microseconds(now) - microseconds(step.start)
            self.event("X", step.start, self.groups[server.name], step.kind, tid=1, dur=duration, args=facts)
        for chunk in step.chunks:
            if chunk.request.decodes:
                self._enter(chunk.request, "decode", now)
        for row in step.verified:
            if row.request.status == "running":
                self._enter(row.request, "decode", now)
        for request in finished:
            self._close(request, now)
        self._count(server, now)

    def _draft_facts(self, server: Server) -> dict[str, int]:
        """Return the drafts that a step has verified and accepted, if the server has them."""
        if server.drafts is None:
            return {}
        last, drafts = self._drafts.get(server, (0, 0)), (server.drafts.drafted, server.drafts.accepted)
        self._drafts[server] = drafts
        return {"drafts": drafts[0] - last[0], "accepted": drafts[1] - last[1]}

    def _note_copies(self, now: float) -> None:
        """Note which requests run now because their KV has been copied."""
        for request in self._without_kv:
            if request.status == "running":
                self._enter(request, "decode" if request.decodes else "prefill", now)
        self._without_kv = [request for request in self._without_kv if request.status == "outside"]

    def _open(self, request: Request, now: float, replica: str) -> None:
        self._close(request, now)  # it is sent again after a crash
        facts = {"prompt": request.prompt, "limit": request.limit, **({"replica": replica} if replica else {})}
        self.slice("b", request, f"request {request.id}", request.sent, facts)
        if request.status == "done":  # rejected on arrival
            self.slice("e", request, f"request {request.id}", now, {"outcome": request.outcome})
            return
        self._states[request] = "queued"
        self.slice("b", request, "queued", request.sent)
        if request.status == "outside":
            self._without_kv.append(request)

    def _enter(self, request: Request, state: str, now: float) -> None:
        old = self._states.get(request)
        if old is not None and old != state:
            self.slice("e", request, old, now)
            self.slice("b", request, state, now)
            self._states[request] = state

    def _close(self, request: Request, now: float) -> None:
        state = self._states.pop(request, None)
        if state is not None:
            self.slice("e", request, state, now)
            self.slice("e", request, f"request {request.id}", now, end_facts(request))

    def _count(self, server: Server, now: float) -> None:
        pool, state, group = server.pool, server_state(server), self.groups[server.name]
        self._counter(group, "queues", now, {name: getattr(state, name) for name in ("waiting", "running", "swapped")})
        has_cache = server.rules.has_prefix_cache and server.prefix_cache is not None
        if pool.total < FOREVER:
            cached = {"cached": state.cached_blocks} if has_cache else {}
            free = pool.total - state.blocks_used - state.cached_blocks
            self._counter(group, "blocks", now, {"held": state.blocks_used, **cached, "free": free})
        if has_cache:
            rate = 100 * state.hits / max(1, state.queries)
            self._counter(group, "prefix cache (tokens)", now, {"queries": state.queries, "hits": state.hits})
            self._counter(group, "prefix cache hits so far (%)", now, {"hits": rate})
            self._counter(group, "evicted blocks", now, {"evicted": state.evicted_blocks})
        if pool.host_total:
            self._counter(group, "host blocks", now, {"held": pool.host_total - pool.host_free})

    def _counter(self, group: int, name: str, now: float, values: dict[str, float]) -> None:
        if self._counters.get((group, name)) != values:
            self._counters[group, name] = values
            self.event("C", now, group, name, args=values)


def microseconds(seconds: float) -> float:
    """Return microseconds with nanosecond precision."""
    return round(seconds * 1e6, 3)


TRACKS = {  # name of the counter track -> names of its values, and their columns
    "utilisation (%)": {"device": UTILISATION, "memory": MEMORY_BUSY},
    "memory (MB)": {"used": MEMORY},
    "power (W)": {"power": POWER},
}


def write_measured_timeline(calls: Sequence[ModelCall], requests: Sequence[Request], rows: Rows, path: Path) -> None:
    """Write the timeline of a finished run."""
    with TraceFile(path) as trace:
        if rows:
            trace.name_group(DEVICE, "device", DEVICE)
        for call in calls:
            shape = call.shape
            facts = {"prompts": shape.prefill_rows, "prompt_tokens": shape.prefill_live, "decodes": shape.decode_live,
                     "context": shape.context, "host_us": microseconds(call.called - call.start)}  # fmt: skip
            duration = microseconds(call.end) - microseconds(call.start)
            trace.event("X", call.start, ENGINE, shape.kind, tid=1, dur=duration, args=facts)
        for request in requests:
            write_request(trace, request)
        for row in rows:
            for track, columns in TRACKS.items():
                values = {name: row[column] for name, column in columns.items() if row[column] is not None}
                if values:
                    trace.event("C", row[TIME] or 0.0, DEVICE, track, args=values)


def write_request(trace: TraceFile, request: Request) -> None:
    """Write a request with its time before and after the first token."""
    end = request.sent if request.client_end is None else request.client_end
    name = f"request {request.id}"
    trace.slice("b", request, name, request.sent, {"prompt": request.prompt, "limit": request.limit})
    if request.first_token is not None:
        for part, start, stop in (
            ("first token", request.sent, request.first_token),
            ("decode", request.first_token, end),
        ):
            trace.slice("b", request, part, start)
            trace.slice("e", request, part, stop)
    trace.slice("e", request, name, end, end_facts(request))


def end_facts(request: Request) -> dict[str, Any]:
    """Return what is known of a request at its end."""
    cached = {"cached": request.cached_tokens} if request.cached_tokens else {}
    return {"outcome": request.outcome or "unfinished", "written": request.written, **cached}


class ServerState(NamedTuple):
    """Queue lengths, KV blocks, and the sums of the prefix cache at one time."""

    waiting: int
    running: int
    swapped: int
    blocks_used: int = 0  # held by requests
    cached_blocks: int = 0  # with cached text that no request holds
    queries: int = 0  # tokens that were looked up in the prefix cache so far
    hits: int = 0  # of these, cached
    evicted_blocks: int = 0  # so far


def server_state(server: Server) -> ServerState:
    """Return the state of a server now; without a limit of its blocks, those in use are not known."""
    pool, cache = server.pool, server.prefix_cache
    used = pool.held if pool.total < FOREVER else 0
    state = ServerState(len(server.waiting), len(server.running), len(server.swapped), used)
    if cache is None:
        return state
    stats = cache.stats
    return state._replace(
        cached_blocks=cache.idle_blocks, queries=stats.queries, hits=stats.hits, evicted_blocks=stats.evicted_blocks
    )


class QueueLog:
    """Keeps the states of a server over time; drops every second point if there are too many.

    The replicas of a fleet have logs of their own; `times` and `queues` are then those of the whole fleet.
    """

    def __init__(self, points: int = 300) -> None:
        self.points = points
        self.replicas: dict[str, QueueLog] = {}  # by name
        self._times: list[float] = []
        self._queues: list[ServerState] = []
        self._interval = 0.0  # minimum seconds between points

    def on_step_start(self, server: Server, step: Step, arrived: Sequence[Request]) -> None:
        self._log_of(server)._add_point(server, step.decided)

    def on_step_end(self, server: Server, step: Step, now: float, finished: Sequence[Request]) -> None:
        if server.idle():
            self._log_of(server)._add_point(server, now, last=bool(server.name))

    @property
    def times(self) -> list[float]:
        """The times of the points."""
        if not self.replicas:
            return self._times
        end = max(log._times[-1] for log in self.replicas.values())
        return [end * number / self.points for number in range(self.points + 1)]

    @property
    def queues(self) -> list[ServerState]:
        """The states at these times; those of replicas are added."""
        if not self.replicas:
            return self._queues
        logs = self.replicas.values()
        return [ServerState(*map(sum, zip(*[log._state_at(time) for log in logs]))) for time in self.times]

    def _state_at(self, time: float) -> ServerState:
        place = bisect_right(self._times, time)
        return self._queues[place - 1] if place else ServerState(0, 0, 0)

    def _log_of(self, server: Server) -> QueueLog:
        if not server.name:
            return self
        return self.replicas.setdefault(server.name, QueueLog(self.points))

    def _add_point(self, server: Server, now: float, last: bool = False) -> None:
        """Add a point, unless the one before it is close; the `last` one before a replica waits is always kept."""
        if self._times and now - self._times[-1] < self._interval and not last:
            return
        self._times.append(now)
        self._queues.append(server_state(server))
        if len(self._times) >= 2 * self.points:
            self._times, self._queues = self._times[last::2], self._queues[last::2]
            self._interval = (self._times[-1] - self._times[0]) / self.points
