"""The parent side of a worker: start it under an interpreter, call it, and raise one-line errors.

Times are seconds. A worker that misses a timeout is killed. After that, or after it died, every call fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Callable, Optional, Union

from servesim.core import BadInput, PolicyError
from servesim.core.errors import DeviceFailed
from servesim.files.scratch import ScratchFolder

from .backend import Model, OutOfMemory

WORKER_SCRIPT = Path(__file__).with_name("worker.py")
START_TIMEOUT_S = 300.0  # to import a framework on a cold disk
LOAD_TIMEOUT_S = 1800.0  # to build a 7B model and compile it
CALL_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 5.0
SAME_ERRORS: dict[str, type[Exception]] = {  # here as in the worker
    "BadInput": BadInput, "OutOfMemory": OutOfMemory, "PolicyError": PolicyError,
}  # fmt: skip
STDERR_BYTES = 4000  # read from the end of stderr when a worker died


class WorkerFailed(DeviceFailed):
    """The worker, or a call to it, failed; `traceback` comes from the worker."""

    def __init__(self, message: str, traceback: str = "") -> None:
        self.traceback = traceback
        super().__init__(message)


class Worker:
    """A process with a backend. Use it as a context manager, or close it."""

    def __init__(self, backend: str = "kbk", python: Optional[str] = None, **options: Any) -> None:
        self.name = backend
        self.python = python or os.environ.get(f"SERVESIM_{backend.upper()}_PYTHON") or sys.executable
        self._home = ScratchFolder()
        self._stderr_log = Path(self._home.name) / "stderr.log"
        self._process = self._start_process()
        self._replies: queue.Queue[Optional[str]] = queue.Queue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=read_lines, args=(self._process.stdout, self._replies), daemon=True)
        self._reader.start()
        try:
            self.about: dict[str, Any] = self.call("open", START_TIMEOUT_S, backend=backend, options=options)
        except BaseException:
            self.kill()
            raise

    def _start_process(self) -> subprocess.Popen[str]:
        command = [self.python, str(WORKER_SCRIPT), "--home", self._home.name]
        try:
            with self._stderr_log.open("wb") as errors:
                # In a new session, Ctrl-C reaches only the parent, which then closes the worker.
                return subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8",
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._home.cleanup()
            raise BadInput(f"--worker-python: cannot run {self.python}: {error.strerror}") from error

    def call(
        self,
        name: str,
        timeout: Optional[float] = CALL_TIMEOUT_S,  # per reply line; None: no timeout
        progress: Optional[Callable[[Any], None]] = None,
        **args: Any,
    ) -> Any:
        """Call the worker and return its result. `progress` receives each progress report."""
        self._send(name, args)
        try:
            while True:
                reply = self._read_reply(name, timeout)
                if "progress" not in reply:
                    break
                if progress is not None:
                    progress(reply["progress"])
        except BaseException:
            self.kill()  # else the next call would read the reply to this one
            raise
        if "error" in reply:
            kind, message, trace = (reply["error"][key] for key in ("kind", "message", "traceback"))
            if kind in SAME_ERRORS:
                raise SAME_ERRORS[kind](message)
            raise WorkerFailed(f"{self.name} worker: {name} failed, {kind}: {message}", trace)
        return reply["result"]

    def _send(self, name: str, args: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, "args": args}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._death_error(name) from None

    def _read_reply(self, name: str, timeout: Optional[float]) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise WorkerFailed(f"{self.name} worker: no reply to {name} within {timeout:g} s; it was killed") from None
        if line is None:
            raise self._death_error(name)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death_error(self, name: str) -> WorkerFailed:
        """Return an error with the exit code or signal and the last line of stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        code, tail = self._process.poll(), self._stderr_tail()
        cause = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return WorkerFailed(f"{self.name} worker ({self.python}): died in {name}, {cause}{': ' + tail if tail else ''}")

    def _stderr_tail(self) -> str:
        try:
            text = self._stderr_log.read_bytes()[-STDERR_BYTES:].decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def load(
        self,
        model: Union[Model, str],
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        weights: Optional[str] = None,
    ) -> None:
        """Load the model in the worker; a name is one of backend.MODELS."""
        self.call(
            "load", LOAD_TIMEOUT_S, model=model if isinstance(model, str) else asdict(model), blocks=blocks,
            block_size=block_size, host_blocks=host_blocks, weights=weights and os.path.abspath(weights),
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Return the description of the backend."""
        about: dict[str, Any] = self.call("describe")
        return about

    def close(self) -> None:
        """Send close to the worker, and kill it if it does not end."""
        if self._process.poll() is None:
            with contextlib.suppress(WorkerFailed):
                self._send("close", {})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the worker and its child processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(CLOSE_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._home.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(stream: IO[str], replies: queue.Queue[Optional[str]]) -> None:
    """Put each line of the stream into the queue, and None at its end."""
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            replies.put(line)
    replies.put(None)
