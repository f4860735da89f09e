"""The worker process: a backend behind a pipe, one JSON line in for each call, progress and one result line out.

Runs as a plain script under any Python from 3.9 that has the framework, servesim not installed: the packages are found
beside this file. A call is {"call": NAME, "args": {...}}; the answers to it are any number of {"progress": ...}, then
{"result": ...} or {"error": {"kind", "message", "traceback"}}. The first call is open. Times are seconds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any, Callable, Optional

if TYPE_CHECKING:
    from .backend import Backend

Emit = Callable[[Any], None]
Job = Callable[[Any, dict[str, Any], Emit], Any]  # (backend, args, emit) -> result

BACKENDS = {  # the module and class of each
    "fake": ("servesim.calibrate.device.fake", "Fake"),
    "kbk": ("servesim.calibrate.device.kbk.backend", "Kbk"),
    "torch": ("servesim.calibrate.device.torch.backend", "TorchBackend"),
}
JOBS = {  # what runs next to the device for long, and reports as it goes: a function (backend, args, emit) -> result
    "probe": ("servesim.calibrate.probe.measure", "run"),
    "replay": ("servesim.calibrate.live.driver", "replay"),
    "serve": ("servesim.calibrate.server.engine_process", "serve"),
    "exercise": ("servesim.calibrate.device.self_test", "run"),
}
PARENT_CHECK = 2.0  # seconds between two looks whether the parent still lives


class Beside(importlib.abc.MetaPathFinder):
    """Finds the package servesim from the folder of this file: in a checkout, a copy of its folders, or an install."""

    def __init__(self, here: str) -> None:
        above = os.path.dirname(os.path.dirname(here))
        installed = os.path.exists(os.path.join(above, "core"))
        self.folders = {"servesim": above if installed else os.path.join(above, "sim")}
        if not installed:
            for name in ("policies", "calibrate", "traces"):
                self.folders["servesim." + name] = os.path.join(above, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return where a package of ours begins; its modules are then found as usual."""
        folder = self.folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def load(backend: Backend, args: dict[str, Any], emit: Emit) -> Any:
    """Load a model, by name or by its fields, and describe the backend."""
    module = importlib.import_module("servesim.calibrate.device.backend")
    model = args.pop("model")
    if isinstance(model, str):
        if model not in module.MODELS:
            bad_input(f"model: unknown {model!r}, expected one of {', '.join(module.MODELS)}")
        model = module.MODELS[model]
    else:
        model = module.Model(**model)
    backend.load(model, **args)
    return backend.describe()


def step(backend: Backend, args: dict[str, Any], emit: Emit) -> Any:
    """Run one step to its end and say how long it took."""
    row = importlib.import_module("servesim.calibrate.device.backend").Row
    rows = [row(*fields) for fields in args["rows"]]
    start = time.perf_counter()
    tokens = backend.step(rows)
    backend.synchronize()
    return {"tokens": tokens, "seconds": time.perf_counter() - start}


CALLS: dict[str, Job] = {
    "load": load,
    "step": step,
    "swap_out": lambda backend, args, emit: backend.swap_out(args["pairs"]),
    "swap_in": lambda backend, args, emit: backend.swap_in(args["pairs"]),
    "synchronize": lambda backend, args, emit: backend.synchronize(),
    "describe": lambda backend, args, emit: backend.describe(),
    "logits": lambda backend, args, emit: backend.logits().tolist(),
    "plain": lambda backend, args, emit: backend.plain(args["tokens"]).tolist(),
}


def bad_input(line: str) -> None:
    """Raise the package's BadInput, which this file may not import at its top."""
    raise importlib.import_module("servesim.core").BadInput(line)


def opened(args: dict[str, Any]) -> Backend:
    """Build the backend that the first call names."""
    name = args["backend"]
    if name not in BACKENDS:
        bad_input(f"backend: unknown {name!r}, expected one of {', '.join(BACKENDS)}")
    module, kind = BACKENDS[name]
    backend: Backend = getattr(importlib.import_module(module), kind)(**args.get("options", {}))
    return backend


def job(name: str) -> Job:
    """Return the function that answers a call, importing it if it is one of the long jobs."""
    if name in CALLS:
        return CALLS[name]
    if name not in JOBS:
        bad_input(f"call: unknown {name!r}, expected one of open, close, {', '.join([*CALLS, *JOBS])}")
    module, function = JOBS[name]
    found: Job = getattr(importlib.import_module(module), function)
    return found


def serve(lines: Iterable[str], out: IO[str]) -> None:
    """Answer calls until one says close, or until the pipe ends."""
    backend: Optional[Backend] = None

    def say(kind: str, value: Any) -> None:
        out.write(json.dumps({kind: value}) + "\n")
        out.flush()

    for line in lines:
        try:
            message = json.loads(line)
            call, args = message["call"], message.get("args", {})
            if call == "close":
                say("result", None)
                return
            if call == "open":
                backend = opened(args)
                say("result", about())
            elif backend is None:
                bad_input(f"call: {call!r} before open")
            else:
                say("result", job(call)(backend, args, lambda value: say("progress", value)))
        except BrokenPipeError:
            return
        except Exception as error:
            say("error", described(error))


def about() -> dict[str, Any]:
    """Say which interpreter this is, and where it found us."""
    package = os.path.dirname(str(importlib.import_module("servesim").__file__))
    return {"python": sys.version.split()[0], "executable": sys.executable, "pid": os.getpid(), "package": package}


def described(error: Exception) -> dict[str, str]:
    """Put an exception into one line and keep its traceback beside it."""
    return {
        "kind": type(error).__name__,
        "message": first_line(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


def first_line(error: BaseException) -> str:
    """Return what an error says, without the headings and rules that MindSpore puts around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line.strip("-") and not line.startswith("- ")]
    return lines[0] if lines else type(error).__name__


def private_pipes() -> tuple[IO[str], IO[str]]:
    """Take stdin and stdout for the protocol; what a framework prints from now on goes to stderr."""
    lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return lines, out


def follow_parent(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of a long job."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK)
    os._exit(1)


def find_packages() -> None:
    """Make the package found by the place of this file."""
    here = os.path.dirname(os.path.abspath(__file__))
    # Our folder holds a package called torch: left on the path, it would hide the framework.
    sys.path[:] = [path for path in map(os.path.abspath, sys.path) if path != here]
    sys.meta_path.insert(0, Beside(here))


def main() -> int:
    """Serve one parent, in a folder where a framework may drop its files."""
    parser = argparse.ArgumentParser(description="Serve a backend over stdin and stdout, one JSON line a call.")
    parser.add_argument("--home", help="folder to work in; a temporary one if not given")
    home = parser.parse_args().home
    find_packages()
    lines, out = private_pipes()
    threading.Thread(target=follow_parent, args=(os.getppid(),), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="servesim-") as temporary:
        os.chdir(home or temporary)  # frameworks leave logs and graphs where they run
        serve(lines, out)
        os.chdir(os.path.dirname(temporary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
