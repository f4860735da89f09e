"""The live driver behind a server: requests come over a socket while it runs, tokens go back over it.

It runs next to the device: Python 3.9, standard library. Lines of JSON. In: {"post": [id, tokens, limit]},
{"drop": id}, {"stop": true}. Out: {"t", "tokens": [[id, token]...], "over": [[id, outcome, reason]...], "state"}.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Mapping
from typing import Any, Callable, Optional

from servesim.calibrate.device.backend import Backend, OutOfMemory
from servesim.calibrate.live.driver import Live, clock_of
from servesim.core import Request, Stuck
from servesim.engine.server import Server
from servesim.engine.step import Gaps, Step

IDLE = 1.0  # longest sleep of a desk with nothing to do
TIDY = 1000  # calls between two clearings of what a run would keep and a server must not


class Desk(Live):
    """A live run without an end: its inbox is a socket."""

    def __init__(self, backend: Backend, args: Mapping[str, Any], line: socket.socket) -> None:
        self.prompts: dict[Request, list[int]] = {}
        engine = {**args["engine"], "refuse": "always"}
        super().__init__(args["policy"], engine, (), backend, self.prompts.pop, clock_of(args.get("pace")))
        self.here: dict[Any, Request] = {}  # by id, until told that it is over
        self.dropped: dict[Any, str] = {}  # ids to be taken out, and why
        self.messages: queue.SimpleQueue[Optional[dict[str, Any]]] = queue.SimpleQueue()
        self._line = line
        self._done = 0  # of server.done, how many were told
        self._tokens: list[list[Any]] = []  # of the last call, not yet sent
        self._failed = False  # whether the last call ran out of memory

    def run(self) -> float:
        """Serve until told to stop, or until the other side is gone."""
        threading.Thread(target=listen, args=(self._line, self.messages.put), daemon=True).start()
        self.loop.now = self.clock.start()
        self._say({"t": self.loop.now, "tokens": [], "over": [], "state": self.state()})
        while not self.stopped:
            self._read(0.0)
            self._drop()
            try:
                instant = self.loop.step()
                self._tell()
                if len(self.calls) >= TIDY:
                    self._tidy()
                if instant is not None:
                    self._idle(instant)
            except Stuck as stuck:  # a livelock of the policy may not end the server
                self._clear(str(stuck))
        return self.loop.now

    def compute(self, step: Step) -> None:
        """Run a call; what does not fit on the device costs its requests their answer, not the server its life."""
        try:
            super().compute(step)
        except OutOfMemory as error:
            self.written = [0] * len(self.stories.writers)
            self.dropped.update({r.id: f"out of memory: {error}" for r in self.stories.writers if r is not None})
            self._failed = True

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        super().ended(server, step, now, over)
        for request in over:
            if request.id in self.dropped:
                request.outcome, request.reason = "failed", self.dropped[request.id]
        if step.calls and not self._failed:
            self._tokens = [[r.id, token] for r, token in zip(self.stories.writers, self.written) if r is not None]
        self._failed = False

    def _idle(self, instant: float) -> None:
        """Sleep until a message comes or something is due."""
        left = min(IDLE, instant - self.clock.now())
        if left > 0:
            self._read(left)
        self.loop.now = self.clock.wait(max(self.loop.now, self.clock.now()))

    def _read(self, patience: float) -> None:
        """Take in the messages there are, waiting for the first."""
        while True:
            try:
                message = self.messages.get(timeout=patience) if patience > 0 else self.messages.get_nowait()
            except queue.Empty:
                return
            patience = 0.0
            if message is None or message.get("stop"):
                self.stopped = True
                return
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "post" in message:
            id, tokens, limit = message["post"]
            request = Request(id, self.loop.now, len(tokens), limit)
            self.here[id] = request
            self.prompts[request] = tokens
            self.loop.inbox.post(request)
        elif "drop" in message and message["drop"] in self.here:
            self.dropped[message["drop"]] = "its client is gone"

    def _drop(self) -> None:
        """Take out requests whose clients are gone; one that nobody has seen yet comes in first."""
        for id, why in list(self.dropped.items()):
            request = self.here.get(id)
            if request is not None and request.place in ("waiting", "running", "swapped"):
                self.loop.abort(request, self.loop.now, why)
                self.stories.forget([request])
            if request is None or request.place == "done":
                del self.dropped[id]

    def close(self) -> None:
        """Take out everybody who is still here."""
        self.dropped.update(dict.fromkeys(self.here, "the server ends"))
        self._drop()

    def _clear(self, why: str) -> None:
        for request in self.loop.server.present():
            self.loop.abort(request, self.loop.now, why)
            self.stories.forget([request])
        self._tell()

    def _tell(self) -> None:
        """Send the tokens of the last call, and the requests that are over."""
        tokens, self._tokens = self._tokens, []
        server = self.loop.server
        over = []
        for request in server.done[self._done :]:
            self.here.pop(request.id, None)
            self.prompts.pop(request, None)
            over.append([request.id, request.outcome, request.reason])
        self._done = len(server.done)
        if tokens or over:
            self._say({"t": self.loop.now, "tokens": tokens, "over": over, "state": self.state()})

    def state(self) -> dict[str, int]:
        """Return the queues and the memory."""
        server = self.loop.server
        flushed = sum(len(self.tables.tables.get(request, ())) for request in server.finished)
        return {
            "waiting": len(server.waiting),
            "running": len(server.running),
            "swapped": len(server.swapped),
            "free_blocks": len(self.tables.free) + flushed,  # what the next plan gives back counts
            "total_blocks": self.tables.total,
            "calls": self.loop.calls,
        }

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._line.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            self.stopped = True

    def _tidy(self) -> None:
        server = self.loop.server
        self.calls.clear()
        server.done.clear()
        self._done = 0
        server.gaps = Gaps()


def listen(line: socket.socket, put: Callable[[Optional[dict[str, Any]]], None]) -> None:
    """Pass messages on as they come, None at their end."""
    try:
        with line.makefile("r", encoding="utf-8") as lines:
            for text in lines:
                put(json.loads(text))
    except (OSError, ValueError):
        pass
    put(None)


def serve(backend: Backend, args: Mapping[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Serve on a loaded backend what comes over the socket that `args` names; return the state at the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(args["socket"])
        desk = Desk(backend, args, line)
        desk.run()
        desk.close()
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)  # the listener holds it open otherwise
        return desk.state()
