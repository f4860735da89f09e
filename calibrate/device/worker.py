"""The worker process: serves a backend over a pipe. Calls and replies are JSON lines. Times are seconds.

It runs as a script under Python 3.9 or newer with the framework. servesim need not be installed: the script finds its
packages relative to this file. A call is {"call": NAME, "args": {...}}; the first call is open. The replies are any
number of {"progress": ...}, then one {"result": ...} or {"error": {"kind", "message", "traceback"}}.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any, Callable, NoReturn, Optional

if TYPE_CHECKING:
    from .backend import Backend

Emit = Callable[[Any], None]
Job = Callable[[Any, dict[str, Any], Emit], Any]  # (backend, args, emit) -> result

BACKENDS = {  # name -> module, class
    "fake": ("servesim.calibrate.device.fake", "FakeBackend"),
    "kbk": ("servesim.calibrate.device.kbk.backend", "KbkBackend"),
    "torch": ("servesim.calibrate.device.torch.backend", "TorchBackend"),
}
ENGINES = {"vllm": ("servesim.calibrate.engines.vllm", "VllmEngine")}  # installed engines, the same
JOBS = {  # long calls that report progress: name -> module, function
    "engine_decide": ("servesim.calibrate.engines.driver", "decide"),
    "engine_settings": ("servesim.calibrate.engines.driver", "settings"),
    "engine_start": ("servesim.calibrate.engines.driver", "start"),
    "probe": ("servesim.calibrate.probe.measure", "run"),
    "replay": ("servesim.calibrate.live.replay_job", "replay"),
    "serve": ("servesim.calibrate.server.engine_process", "serve"),
}
PARENT_CHECK_S = 2.0  # seconds between two checks that the parent process exists


class PackageFinder(importlib.abc.MetaPathFinder):
    """Finds servesim relative to this file: in a checkout, in a copy of its folders, or in an installed package."""

    def __init__(self, here: str) -> None:
        above = os.path.dirname(os.path.dirname(here))
        installed = os.path.exists(os.path.join(above, "core"))
        self.folders = {"servesim": above if installed else os.path.join(above, "sim")}
        if not installed:
            for name in ("policies", "routers", "calibrate", "traces"):
                self.folders["servesim." + name] = os.path.join(above, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a servesim package. Python then finds its modules as usual."""
        folder = self.folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def load(backend: Backend, args: dict[str, Any], emit: Emit) -> Any:
    """Load a model, given by name or by its fields, and describe the backend."""
    module = importlib.import_module("servesim.calibrate.device.backend")
    model = args.pop("model")
    backend.load(module.model_named(model) if isinstance(model, str) else module.Model(**model), **args)
    return backend.describe()


CALLS: dict[str, Job] = {"load": load, "describe": lambda backend, args, emit: backend.describe()}


def bad_input(message: str) -> NoReturn:
    """Raise BadInput of servesim.core. This file cannot import it at the top: the package is not found yet."""
    raise importlib.import_module("servesim.core").BadInput(message)


def open_backend(args: dict[str, Any]) -> Backend:
    """Build the backend that the open call names."""
    name = args["backend"]
    known = {**BACKENDS, **ENGINES}
    if name not in known:
        bad_input(f"backend: unknown {name!r}, expected one of {', '.join(BACKENDS)}")
    module, kind = known[name]
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "servesim":
            raise
        bad_input(
            f"backend {name}: {sys.executable} cannot import {error.name}; install it there, or name another"
            " interpreter with --worker-python"
        )
    backend: Backend = getattr(found, kind)(**args.get("options", {}))
    return backend


def find_job(name: str) -> Job:
    """Return the function of a call. Import it if it is a long job."""
    if name in CALLS:
        return CALLS[name]
    if name not in JOBS:
        bad_input(f"call: unknown {name!r}, expected one of open, close, {', '.join([*CALLS, *JOBS])}")
    module, function = JOBS[name]
    job: Job = getattr(importlib.import_module(module), function)
    return job


def serve(lines: Iterable[str], out: IO[str]) -> None:
    """Reply to calls until the close call or the end of the pipe."""
    backend: Optional[Backend] = None

    def send(kind: str, value: Any) -> None:
        out.write(json.dumps({kind: value}) + "\n")
        out.flush()

    for line in lines:
        try:
            message = json.loads(line)
            call, args = message["call"], message.get("args", {})
            if call == "close":
                send("result", None)
                return
            if call == "open":
                backend = open_backend(args)
                send("result", about_interpreter())
            elif backend is None:
                bad_input(f"call: {call!r} before open")
            else:
                send("result", find_job(call)(backend, args, lambda value: send("progress", value)))
        except BrokenPipeError:
            return
        except Exception as error:
            kind, message = type(error).__name__, first_line(error)
            send("error", {"kind": kind, "message": message, "traceback": traceback.format_exc()})


def about_interpreter() -> dict[str, Any]:
    """Return the interpreter of this process and the folder of servesim."""
    package = os.path.dirname(str(importlib.import_module("servesim").__file__))
    return {"python": sys.version.split()[0], "executable": sys.executable, "pid": os.getpid(), "package": package}


def first_line(error: BaseException) -> str:
    """Return the first line of an error message. Skip the headings and dashed lines that MindSpore adds."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line.strip("-") and not line.startswith("- ")]
    return lines[0] if lines else type(error).__name__


def reserve_pipes() -> tuple[IO[str], IO[str]]:
    """Reserve stdin and stdout for the protocol. Output of the framework then goes to stderr."""
    lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return lines, out


def exit_with_parent(parent: int) -> None:
    """End this process when its parent process has ended, even during a long job."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def find_packages() -> None:
    """Make servesim importable relative to this file."""
    here = os.path.dirname(os.path.abspath(__file__))
    # This folder has a sub-package named torch. On sys.path it would hide the framework. This file may be a link.
    own = os.path.realpath(here), os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in map(os.path.abspath, sys.path) if os.path.realpath(path) not in own]
    sys.meta_path.insert(0, PackageFinder(here))


def main() -> int:
    """Serve one parent process."""
    parser = argparse.ArgumentParser(description="Serve a backend over stdin and stdout, one JSON line per call.")
    parser.add_argument("--home", help="working folder (default: a temporary folder)")
    home = parser.parse_args().home
    find_packages()
    lines, out = reserve_pipes()
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    scratch: Any = None if home else importlib.import_module("servesim.files.scratch").ScratchFolder()
    os.chdir(home or scratch.name)  # frameworks write logs and graphs to the working folder
    serve(lines, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
