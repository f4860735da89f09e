"""The parent's side of a worker: start it under some interpreter, call it, and say in one line what went wrong.

Times are seconds. A worker that does not answer in time, or dies, is ended and cannot be called again.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Callable, Optional, Union

from servesim.core import BadInput

from .backend import Backend, Model, OutOfMemory, Row

WORKER = Path(__file__).with_name("worker.py")
OPEN = 300.0  # to import a framework on a cold disk
LOAD = 1800.0  # to build a 7B model and compile it
CALL = 120.0
CLOSE = 5.0
TAIL = 4000  # bytes of stderr looked at when a worker died


class WorkerFailed(RuntimeError):
    """The worker, or a call to it, failed; `traceback` is the worker's own."""

    def __init__(self, line: str, traceback: str = "") -> None:
        self.traceback = traceback
        super().__init__(line)


class Worker(Backend):
    """A backend in a process of its own. Use it as a context, or close it."""

    def __init__(self, backend: str = "kbk", python: Optional[str] = None, **options: Any) -> None:
        self.name = backend
        self.python = python or os.environ.get(f"SERVESIM_{backend.upper()}_PYTHON") or sys.executable
        self.seconds = 0.0  # how long the last step took, measured next to the device
        self._home = tempfile.TemporaryDirectory(prefix="servesim-", ignore_cleanup_errors=True)
        self._errors = Path(self._home.name) / "stderr.log"
        self._process = self._started()
        self._answers: queue.Queue[Optional[str]] = queue.Queue()
        assert self._process.stdout is not None
        self._listener = threading.Thread(target=listen, args=(self._process.stdout, self._answers), daemon=True)
        self._listener.start()
        try:
            self.about: dict[str, Any] = self.call("open", OPEN, backend=backend, options=options)
        except BaseException:
            self.kill()
            raise

    def _started(self) -> subprocess.Popen[str]:
        command = [self.python, str(WORKER), "--home", self._home.name]
        try:
            with self._errors.open("wb") as errors:
                # A session of its own: Ctrl-C reaches the parent alone, which then ends the worker in good order.
                return subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,
                )
        except OSError as error:
            self._home.cleanup()
            raise BadInput(f"worker python: cannot run {self.python}: {error.strerror}") from error

    def call(
        self,
        name: str,
        timeout: Optional[float] = CALL,  # for each line of the answer; None waits for ever
        progress: Optional[Callable[[Any], None]] = None,
        **args: Any,
    ) -> Any:
        """Have the worker do something and return its result; `progress` is called with each report on the way."""
        self._send(name, args)
        try:
            while True:
                answer = self._answer(name, timeout)
                if "progress" not in answer:
                    break
                if progress is not None:
                    progress(answer["progress"])
        except BaseException:
            self.kill()  # an answer still to come would be taken for that of the next call
            raise
        if "error" in answer:
            raise self._error(name, answer["error"])
        return answer["result"]

    def _send(self, name: str, args: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, "args": args}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._died(name) from None

    def _answer(self, name: str, timeout: Optional[float]) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise WorkerFailed(f"{self.name} worker: no answer to {name} in {timeout:g} s; it was ended") from None
        if line is None:
            raise self._died(name)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self, name: str) -> WorkerFailed:
        """Say how the process ended and what it said last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE)
        code = self._process.poll()
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exit code {code}"
        said = self._last_words()
        return WorkerFailed(f"{self.name} worker ({self.python}): died in {name}, {how}{': ' + said if said else ''}")

    def _last_words(self) -> str:
        try:
            text = self._errors.read_bytes()[-TAIL:].decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def _error(self, name: str, error: dict[str, str]) -> Exception:
        """Turn a reported exception into one of ours."""
        kind, message = error["kind"], error["message"]
        if kind == "BadInput":
            return BadInput(message)
        if kind == "OutOfMemory":
            return OutOfMemory(message)
        return WorkerFailed(f"{self.name} worker: {name} failed, {kind}: {message}", error["traceback"])

    def load(
        self,
        model: Union[Model, str],
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        weights: Optional[str] = None,
    ) -> None:
        """Build the model there; a name is one of backend.MODELS."""
        self.call(
            "load",
            LOAD,
            model=model if isinstance(model, str) else asdict(model),
            blocks=blocks,
            block_size=block_size,
            host_blocks=host_blocks,
            weights=None if weights is None else os.path.abspath(weights),
        )

    def step(self, rows: Sequence[Row]) -> list[int]:
        # Rows may hold arrays, which JSON does not take.
        plain = [([int(token) for token in row.tokens], int(row.position), [int(b) for b in row.table]) for row in rows]
        answer = self.call("step", rows=plain)
        self.seconds = answer["seconds"]
        tokens: list[int] = answer["tokens"]
        return tokens

    def _swap(self, pairs: Sequence[tuple[int, int]], out: bool) -> None:
        self.call("swap_out" if out else "swap_in", pairs=list(pairs))

    def synchronize(self) -> None:
        self.call("synchronize")

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = self.call("describe")
        return described

    def close(self) -> None:
        """Ask the worker to end, and end it if it does not."""
        if self._process.poll() is None:
            with contextlib.suppress(WorkerFailed):
                self._send("close", {})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE)
        self.kill()

    def kill(self) -> None:
        """End the worker now."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join(CLOSE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._home.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(stream: IO[str], answers: queue.Queue[Optional[str]]) -> None:
    """Pass lines on as they come, and None at their end."""
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            answers.put(line)
    answers.put(None)
