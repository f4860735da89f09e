"""The worker side of an installed engine: one message per decision, the engine's own step functions in a thread.

The parent process is the master. A message has the results of steps that have returned, and the requests that have
arrived or left. Its reply is the next decision of the engine. The step function of an engine schedules, starts the
model and waits for a result. So it runs in a thread: when it waits, the decision is replied, and the next message
brings the result.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any, Optional

Emit = Any
NOTHING: dict[str, Any] = {"scheduled": [], "preempted": []}
CLOCKS = ("time", "monotonic")  # functions of the module time that return the simulated time


class EndOfRun(BaseException):
    """The parent process needs no further decision."""


class Driver:
    """One run of an engine. `engine` has `start`, `add`, `abort`, `step`, `free_blocks`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.now = 0.0
        self.results: dict[int, list[list[int]]] = {}  # step: rows, as (request, its tokens, its next drafts)
        self.decision = NOTHING
        self._steps = 0
        self._message: Optional[dict[str, Any]] = None
        self._arrivals: list[dict[str, Any]] = []
        self._aborts: list[int] = []
        self._messages: SimpleQueue[Optional[dict[str, Any]]] = SimpleQueue()
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def decide(self, message: dict[str, Any]) -> Any:
        """Give the engine a message and return its decision. Raise the error of the engine."""
        if self._thread.ident is None:
            self._thread.start()
        self._messages.put(message)
        reply = self._replies.get()
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def end(self) -> None:
        """End the thread of the engine, which waits for a message."""
        if self._thread.is_alive():
            self._messages.put(None)
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._receive()
            while True:
                for arrival in self._arrivals:
                    self.engine.add(**arrival)
                for number in self._aborts:
                    self.engine.abort(number)
                self._arrivals, self._aborts, message = [], [], self._message
                self.engine.step()
                if self._message is message:  # otherwise the step waited: the decision on the new message is next
                    self._reply()
                    self._receive()
        except EndOfRun:
            return
        except BaseException as error:
            self._replies.put(error)

    def schedule(self, scheduled: list[list[int]], preempted: list[int]) -> int:
        """Note the decision of the engine. Return the number of its step."""
        self.decision = {"scheduled": scheduled, "preempted": preempted}
        if scheduled:
            self._steps += 1
        return self._steps

    def wait(self, step: int) -> list[list[int]]:
        """Wait until a step has returned. Return its rows that got a token."""
        if step not in self.results:
            self._reply()
            self._receive()
            if step not in self.results:
                raise RuntimeError(f"the engine waits for step {step}, which does not run")
        return self.results.pop(step)

    def _reply(self) -> None:
        self._replies.put({**self.decision, "free": self.engine.free_blocks()})

    def _receive(self) -> None:
        self._message = message = self._messages.get()
        if message is None:
            raise EndOfRun
        self.now = message["now"]
        self.results.update({int(step): rows for step, rows in message["results"]})
        self._arrivals += message["arrivals"]
        self._aborts += message["aborts"]
        self.decision = NOTHING


def settings(engine: Any, args: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Return the version of an engine and its settings with these flags."""
    result: dict[str, Any] = engine.settings(args["flags"])
    return result


def start(engine: Any, args: dict[str, Any], emit: Emit) -> None:
    """Start a new run; an earlier one ends."""
    if engine.driver is not None:
        engine.driver.end()
    engine.driver = driver = Driver(engine)
    engine.start(**args)
    for name in CLOCKS:  # a scheduler may read the clock
        setattr(time, name, lambda: driver.now)


def decide(engine: Any, args: dict[str, Any], emit: Emit) -> Any:
    """Return the next decision of the run."""
    return engine.driver.decide(args)
