"""The live driver behind `sim serve`: requests arrive over a socket while it runs, and tokens leave over it.

It runs next to the device: Python 3.9, standard library. Messages are JSON lines.
In: {"submit": [id, tokens, limit, priority]}, {"abort": id}, {"stop": true}.
Out: {"t", "tokens": [[id, token]...], "finished": [[id, outcome, reason, queued]...], "state"}.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from servesim.calibrate.device.backend import Backend, OutOfMemory
from servesim.calibrate.live.driver import LaunchedCall, LiveDriver, make_clock
from servesim.calibrate.live.shared_blocks import SharedBlockTables
from servesim.calibrate.live.token_history import TokenHistory
from servesim.config.user_code import use_access, user_errors
from servesim.core import Request, Stuck
from servesim.core.content import Content
from servesim.engine.server import Server
from servesim.engine.step import Step, TokenGaps

MAX_IDLE_S = 1.0  # maximum seconds of one sleep without work
CALLS_KEPT = 1000  # model calls after which the history is cleared: a server has no end


class EngineLoop(LiveDriver):
    """A live run without an end: its requests come from a socket."""

    def __init__(self, backend: Backend, args: Mapping[str, Any], connection: socket.socket) -> None:
        self.prompts: dict[Request, list[int]] = {}
        engine = {**args["engine"], "reject_oversized": "always", "client_timeout": None}  # real clients
        history = TokenHistory(self.prompts.pop)
        super().__init__(args["policy"], engine, (), backend, history, make_clock(args.get("pace")))
        self.open: dict[Any, Request] = {}  # by id, until the client knows the outcome
        self.aborted: dict[Any, str] = {}  # ids to abort, with the reason
        self.messages: queue.SimpleQueue[Optional[dict[str, Any]]] = queue.SimpleQueue()
        self._connection = connection
        self._done: list[Request] = []  # finished requests, not yet sent
        self.loop.server.done = self._done
        self._tokens: list[list[Any]] = []  # of the last call, not yet sent
        self._cache_is_wrong = False  # whether the prefix cache has blocks that a failed call did not write
        self._preemptions = 0  # so far

    def run(self) -> float:
        """Serve until a stop message, or until the connection closes."""
        threading.Thread(target=listen, args=(self._connection, self.messages.put), daemon=True).start()
        self.loop.now = self.loop.decides_at = self.clock.start()
        self._send([], [])
        while not self.stopped:
            self._read(0.0)
            self._abort_requests()
            try:
                self.do_next()
            except Stuck as stuck:  # a livelock of the policy must not end the server
                for request in self.loop.server.all_requests():
                    self.loop.abort(request, self.loop.now, str(stuck))
                    self.history.drop([request])
                self._send_results()
        self.collect_all()
        return self.loop.now

    def do_next(self) -> None:
        """Do the next thing that is due, or sleep; then send what is new."""
        if self.loop.is_due_now:
            self.loop.advance()
        else:
            self._idle(self.loop.next_time)
        self._send_results()
        if len(self.calls) >= CALLS_KEPT:
            self._trim_history()

    def compute(self, step: Step) -> None:
        """Run a model call. Out of memory fails the requests of this step; the server continues."""
        try:
            super().compute(step)
        except OutOfMemory as error:
            self._fail(step, self.launched[-1], self.history.in_flight[-1], error)

    def collect(self, step: Step) -> None:
        try:
            super().collect(step)
        except OutOfMemory as error:
            self._fail(step, self.launched[0], self.history.in_flight[0], error)

    def _fail(self, step: Step, call: LaunchedCall, rows: Sequence[Optional[Request]], error: OutOfMemory) -> None:
        """Fail all requests of a step."""
        call.tokens, call.failed, self._cache_is_wrong = [0] * len(rows), True, True
        for request in (*(chunk.request for chunk in step.chunks), *rows):
            if request is not None:
                self.aborted[request.id] = f"out of memory: {error}"

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        super().on_step_start(server, step, arrived)
        self._preemptions += len(step.preempted)

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        call = self.launched[0] if step.runs_model else None
        super().on_step_end(server, step, now, finished)
        for request in finished:
            if request.id in self.aborted:
                request.outcome, request.reason = "failed", self.aborted[request.id]
        if call is not None and call.tokens is not None and not call.failed:
            pairs = [(r, token) for r, token in zip(self.history.row_requests, call.tokens) if r is not None]
            self._tokens = [[request.id, token] for request, token in pairs]
            # A later prompt may contain the answer, so its tokens become a part of the text.
            cache = server.prefix_cache
            for request, token in pairs:
                text = None if cache is None or request.status == "done" else cache.text_of(request)
                if text is not None:  # its last piece is the rest of the answer, which is not known yet
                    text.names.insert(-1, token)
                    text.ends.insert(-1, text.ends[-2] + 1)

    def _idle(self, wake_at: float) -> None:
        """Sleep until a message arrives or `wake_at`."""
        left = min(MAX_IDLE_S, wake_at - self.clock.now())
        if left > 0:
            self._read(left)
        self.loop.now = self.clock.wait(max(self.loop.now, self.clock.now()))

    def _read(self, timeout: float) -> None:
        """Process all messages in the queue; wait `timeout` seconds for the first one."""
        while True:
            try:
                message = self.messages.get(timeout=timeout) if timeout > 0 else self.messages.get_nowait()
            except queue.Empty:
                return
            timeout = 0.0
            if message is None or message.get("stop"):
                self.stopped = True
                return
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        if "submit" in message:
            id, tokens, limit, priority = message["submit"]
            content = None
            if self.loop.server.prefix_cache is not None:  # every token is a text of its own
                content = Content(tokens, range(1, len(tokens) + 1))
            request = Request(id, self.loop.now, len(tokens), limit, priority=priority, content=content)
            self.open[id] = request
            self.prompts[request] = tokens
            self.loop.inbox.clients.number(request)
            self.loop.send(request)
        elif "abort" in message and message["abort"] in self.open:
            self.aborted[message["abort"]] = "the client disconnected"

    def _abort_requests(self) -> None:
        """Abort requests whose clients disconnected. A request must reach a queue before it can be aborted."""
        for id, reason in list(self.aborted.items()):
            request = self.open.get(id)
            if request is not None and request.status in ("waiting", "running", "swapped"):
                self.loop.abort(request, self.loop.now, reason)
                self.history.drop([request])
            if request is None or request.status == "done":
                del self.aborted[id]
        if self._cache_is_wrong and isinstance(self.tables, SharedBlockTables):
            self.tables.clear()
        self._cache_is_wrong = False

    def close(self) -> None:
        """Abort all open requests."""
        self.aborted.update(dict.fromkeys(self.open, "the server stops"))
        self._abort_requests()

    def _send_results(self) -> None:
        """Send the tokens of the last call and the finished requests."""
        tokens, self._tokens = self._tokens, []
        finished = []
        for request in self._done:
            self.open.pop(request.id, None)
            self.prompts.pop(request, None)
            queued = None if request.scheduled is None else request.scheduled - request.arrival
            finished.append([request.id, request.outcome, request.reason, queued])
        self._done.clear()
        if tokens or finished:
            self._send(tokens, finished)

    def state(self) -> dict[str, int]:
        """Return the queue lengths, the block counts, and the calls, preemptions and cached tokens so far."""
        server, cache = self.loop.server, self.loop.server.prefix_cache
        flushed = sum(len(self.tables.tables.get(request, ())) for request in server.finished)
        return {
            "waiting": len(server.waiting),
            "running": len(server.running),
            "swapped": len(server.swapped),
            "free_blocks": self.tables.free_count + flushed,  # includes blocks that the next plan frees
            "total_blocks": self.tables.total,
            "calls": self.loop.calls,
            "preemptions": self._preemptions,
            "prefix_cache_queries": 0 if cache is None else cache.stats.queries,
            "prefix_cache_hits": 0 if cache is None else cache.stats.hits,
            "prefix_cache_evictions": 0 if cache is None else cache.stats.evicted_blocks,
        }

    def _send(self, tokens: list[list[Any]], finished: list[list[Any]]) -> None:
        message = {"t": self.loop.now, "tokens": tokens, "finished": finished, "state": self.state()}
        try:
            self._connection.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            self.stopped = True

    def _trim_history(self) -> None:
        self.calls.clear()
        self.loop.server.token_gaps = TokenGaps()


def listen(connection: socket.socket, put: Callable[[Optional[dict[str, Any]]], None]) -> None:
    """Forward each message to `put`, and None at the end of the stream."""
    try:
        with connection.makefile("r", encoding="utf-8") as lines:
            for text in lines:
                put(json.loads(text))
    except (OSError, ValueError):
        pass
    put(None)


def serve(backend: Backend, args: Mapping[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Serve requests from the socket `args["socket"]` on a loaded backend; return the final state."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(args["socket"])
        try:
            with use_access(args.get("code")):  # as in the parent process
                engine = EngineLoop(backend, args, connection)
            with user_errors(engine.loop.policy):
                engine.run()
            engine.close()
            return engine.state()
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # otherwise the listener thread keeps it open
