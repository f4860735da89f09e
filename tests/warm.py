"""`sim` commands that start at once: a server that has imported servesim forks a process for each command.

`sim()` is the path of a command like `sim`. It passes its words, folder, environment and standard streams to the server
of this test process, and ends as the forked process ends. What a fresh interpreter reads from its environment
(`PYTHON...`, the locale) or from a terminal is tested by few tests: there the command starts a fresh interpreter.

    subprocess.run([sim(), "run", "my.yaml"], cwd=folder, ...)    # 20 ms and what the command does; a fresh one: 400 ms
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import io
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

keep_alive: list[object] = []
OWN_START = ("PYTHON", "LC_", "LANG", "COVERAGE", "SERVESIM_FRESH")  # beginnings of variables that a start reads
FOLDER, OWNER = "SERVESIM_WARM", "SERVESIM_WARM_OWNER"
CLIENT = """#!{python} -IS
import os, signal, socket, sys
own = {{name: value for name, value in os.environ.items() if name.startswith({own_start!r})}}
streams = []
for fd in 0, 1, 2:
    try:
        os.fstat(fd)
    except OSError:
        continue
    streams.append(fd)
if own != {own!r} or any(map(os.isatty, streams)) or not hasattr(os, "pidfd_open"):
    os.execv({python!r}, [{python!r}, "-m", "servesim", *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
if server.fileno() < 3:  # streams are closed: their numbers stay free
    high = socket.socket(fileno=__import__("fcntl").fcntl(server.fileno(), 0, 10))
    server.close()
    server = high
server.connect({address!r})
numbers = [int(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
text = repr([sys.argv[1:], os.getcwd(), dict(os.environ), streams, os.umask(0), ignored]).encode()
server.sendall(len(text).to_bytes(8, "big"))
if streams:
    socket.send_fds(server, [b"s"], streams)
else:
    server.sendall(b"s")
server.sendall(text)
for number in numbers:  # also those that a shell lets a background job ignore: the command may handle them
    signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
status = server.recv(16)
status = int(status) if status else -9
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status not in (9, 19) else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def folder() -> Path:
    """Return the folder of the server. The first process of a test run makes it, and its workers inherit it."""
    if FOLDER not in os.environ:
        made = tempfile.mkdtemp(prefix="servesim-warm-")
        os.environ.update({FOLDER: made, OWNER: str(os.getpid())})
        atexit.register(end, Path(made), os.getpid())
    return Path(os.environ[FOLDER])


def end(made: Path, owner: int) -> None:
    """Remove the folder, which ends the server; a forked process does not own it."""
    if os.getpid() == owner:
        shutil.rmtree(made, ignore_errors=True)


@functools.cache
def sim() -> str:
    """Return the path of the command; its folder can stand first in PATH. The server starts at the first call."""
    address, client = folder() / "socket", folder() / "sim"
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not client.exists():
            plain = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
            command = [sys.executable, __file__, str(address)]
            server = subprocess.Popen(command, env=plain, stdout=subprocess.PIPE, start_new_session=True)
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"
            own = {name: value for name, value in os.environ.items() if name.startswith(OWN_START)}
            text = CLIENT.format(python=sys.executable, own_start=OWN_START, own=own, address=str(address))
            client.write_text(text, encoding="utf-8")
            client.chmod(0o755)
    return str(client)


def import_all() -> None:
    """Import what commands import, also what they import late."""
    import servesim

    names = [module.name for module in pkgutil.walk_packages(servesim.__path__, "servesim.", onerror=lambda name: None)]
    wanted = [name for name in names if not name.endswith("__main__") and ".calibrate.device" not in name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in [*wanted, "yaml", "jinja2", "plotly.graph_objects", "matplotlib.figure"]:
            with contextlib.suppress(ImportError, SystemExit):
                importlib.import_module(name)


def serve(address: str) -> list[str]:
    """Fork a process for each connection. Return, in such a process only, the words of its command."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the keepers of the commands
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests, and they end this server
    os.write(1, b"ready\n")
    while True:
        while not select.select([listener], [], [], 1.0)[0]:
            if not (os.path.exists(address) and os.path.exists(f"/proc/{os.environ[OWNER]}")):  # the tests have ended
                shutil.rmtree(os.path.dirname(address), ignore_errors=True)
                os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return become_command(connection)
        connection.close()


def receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly this number of bytes."""
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return parts


def become_command(connection: socket.socket) -> list[str]:
    """Fork the process of the command and keep it; return the words in the forked process."""
    size = int.from_bytes(receive(connection, 8), "big")
    _, fds, _, _ = socket.recv_fds(connection, 1, 3)
    words, folder, environment, streams, umask, ignored = ast.literal_eval(receive(connection, size).decode())
    command = os.fork()
    if command:
        for fd in fds:
            os.close(fd)
        keep(command, connection)
    connection.close()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    os.umask(umask)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    use_streams(dict(zip(streams, fds)))
    return list(words)


def use_streams(passed: dict[int, int]) -> None:
    """Replace the standard streams; those that the command does not have are closed."""
    high = {fd: os.dup(passed_fd) if passed_fd < 3 else passed_fd for fd, passed_fd in passed.items()}
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream: Any = None
        if fd in high:
            os.dup2(high[fd], fd)
            errors = "backslashreplace" if fd == 2 else None
            raw: Any = os.fdopen(fd, f"{mode}b", closefd=False)
            stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=fd == 2)
        else:
            with contextlib.suppress(OSError):
                os.close(fd)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for fd in high.values():
        if fd > 2:
            os.close(fd)


def keep(command: int, connection: socket.socket) -> NoReturn:
    """Pass signals to the command and its status back; kill it if the client has gone."""
    ended = os.pidfd_open(command)
    while True:
        readable, _, _ = select.select([ended, connection], [], [])
        if ended in readable:
            _, status = os.waitpid(command, 0)
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        with contextlib.suppress(OSError):
            number = connection.recv(1)
            if number:
                os.kill(command, number[0])
                continue
        with contextlib.suppress(OSError):
            os.killpg(command, signal.SIGKILL)
        os._exit(0)


def run(words: list[str]) -> NoReturn:
    """Run the command as `python -m servesim` does, and end without the slow end of an interpreter."""
    from servesim.cli import main

    keep_alive.append(sys.modules["__main__"])
    sys.modules["__main__"] = type(sys)("__main__")  # processes that the command starts must not import this file
    sys.argv = ["sim", *words]
    code: Any
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    import_all()
    gc.collect()
    gc.freeze()
    run(serve(sys.argv[1]))
