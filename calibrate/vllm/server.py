"""A vLLM server as a child process on 127.0.0.1, with the scheduler that records its steps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from http.client import HTTPException
from itertools import chain, count
from pathlib import Path
from typing import Optional

from servesim.calibrate.client.server_counters import ask
from servesim.core import BadInput

RECORDER = Path(__file__).parents[1] / "adapter" / "vllm_recorder.py"
PYTHON_VARIABLE = "SERVESIM_VLLM_PYTHON"  # interpreter with vLLM, if there is no --worker-python
OUR_FLAGS = {"--host": "the server listens on 127.0.0.1", "--scheduler-cls": "the recorder is the scheduler class"}
START_TIMEOUT_S = 1800.0  # to load and compile a large model
STOP_TIMEOUT_S = 30.0
END_TIMEOUT_S = 3.0  # for a server that refused a connection, to end
POLL_S = 0.5
PR_SET_PDEATHSIG = 1
LOG_BYTES = 100_000  # read from the end of the log of a server that ended
ERROR = re.compile(r"(\w*(?:Error|Exception): .*|error: .*)")
POINTS_ELSEWHERE = re.compile(r"root cause above|Engine core initialization failed|Failed core proc")
VALIDATION = re.compile(r"validation errors? for")
DETAIL = re.compile(r"(?:Value|Assertion) error, ")


class ServerFailed(RuntimeError):
    """The server did not start, or ended."""


class VllmServer:
    """A running server. Use it as a context manager: it leaves no process behind."""

    def __init__(self, arguments: Sequence[str], python: Optional[str], folder: Path) -> None:
        self.python = python or os.environ.get(PYTHON_VARIABLE) or sys.executable
        self.version = installed_version(self.python)
        self.log, self.steps = new_file(folder / "server.log"), new_file(folder / "steps.jsonl")
        model, *flags = arguments
        refuse_flags(model, flags)
        port = chosen_port(flags)
        self.url = f"http://127.0.0.1:{port}"
        self.command = [
            self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags, "--host", "127.0.0.1",
            "--port", str(port), "--scheduler-cls", f"{RECORDER.stem}.recording_scheduler",
        ]  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(RECORDER.parent), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "SERVESIM_STEPS": str(self.steps.resolve())}
        with self.log.open("wb") as log:
            # In a new session, Ctrl-C reaches only this process, which then stops the server and its children.
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Wait until the server answers; raise ServerFailed if it ends first."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError, HTTPException):
                ask(self.url, "/health")
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"vLLM did not answer within {START_TIMEOUT_S:g} s; log: {self.log}")
            time.sleep(POLL_S)

    def why_failed(self, failed: Exception) -> str:
        """Return the reason as text: how the server ended, if it did; else what failed."""
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return str(failed)
        if code < 0:
            return f"vLLM ended, killed by {signal.Signals(-code).name}; log: {self.log}"
        cause = root_cause(self.log.read_bytes()[-LOG_BYTES:].decode("utf-8", "replace"))
        return f"vLLM ended, exit code {code}{f': {cause[:300]}' if cause else ''}; log: {self.log}"

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server, and kill what is left of its process group."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def new_file(path: Path) -> Path:
    """Return a path, or one with a number if it exists: a server that starts again overwrites no steps."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(one for one in chain([path], numbered) if not one.exists())


def root_cause(log: str) -> Optional[str]:
    """Return the error that ended a server: the last one that does not only point to another one."""
    lines = [line for line in log.splitlines() if "WARNING" not in line]
    errors = [(number, found[1]) for number, line in enumerate(lines) if (found := ERROR.search(line))]
    causes = [(number, text) for number, text in errors if not POINTS_ELSEWHERE.search(text)]
    if not causes:
        return errors[-1][1] if errors else None
    number, text = causes[-1]
    if VALIDATION.search(text) and (more := [line for line in lines[number + 1 :] if DETAIL.search(line)]):
        text = DETAIL.split(more[0])[-1]  # pydantic writes the reason in a later line
    return text


def end_with_parent() -> None:
    """Ask Linux to stop the server if this process is killed; other systems have no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def installed_version(python: str) -> str:
    """Return the version of vLLM that an interpreter has; raise BadInput if it has none."""
    code = "import importlib.util as u; u.find_spec('vllm') or exit(3); import vllm; print(vllm.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=START_TIMEOUT_S)
    except OSError as error:
        raise BadInput(f"--worker-python: cannot run {python}: {error.strerror}") from None
    if done.returncode == 3:
        raise BadInput(f"vLLM is not installed for {python}: set --worker-python, or {PYTHON_VARIABLE}, to its Python")
    lines = (done.stdout if done.returncode == 0 else done.stderr).split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    if done.returncode:
        raise BadInput(f"--worker-python: {python} cannot import vLLM: {last}")
    return last


def refuse_flags(model: str, flags: Sequence[str]) -> None:
    """Raise BadInput if the model is missing, or for flags that this command sets."""
    if model.startswith("-"):
        raise BadInput(f"after --: expected the model first, then the flags of vLLM, got {model!r}")
    for flag in flags:
        reason = OUR_FLAGS.get(flag.partition("=")[0])
        if reason:
            raise BadInput(f"after --: expected no {flag.partition('=')[0]}: {reason}")


def chosen_port(flags: Sequence[str]) -> int:
    """Return the port in the flags, else a free one; raise BadInput if another program uses it."""
    joined = " ".join(flags)
    found = re.search(r"--port[= ](\d{1,5})\b", joined)
    port = int(found[1]) if found else 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(f"after --: --port {port}: cannot listen there: {reason}") from None
        return int(probe.getsockname()[1])
