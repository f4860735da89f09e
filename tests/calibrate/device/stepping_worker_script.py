"""The worker script with more calls, for stepping_worker.py: single steps, swaps and logits of its backend.

    python stepping_worker_script.py WORKER_SCRIPT [OPTIONS OF THE WORKER]

Python 3.9, without the package of the tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from typing import Any


def step(backend: Any, args: dict[str, Any], emit: Any) -> dict[str, Any]:
    """Run one step, wait for its end, and return its tokens and seconds."""
    row = importlib.import_module("servesim.calibrate.device.backend").Row
    rows = [row(*fields) for fields in args["rows"]]
    start = time.perf_counter()
    tokens = backend.step(rows)
    backend.synchronize()
    return {"tokens": tokens, "seconds": time.perf_counter() - start}


def plain(backend: Any, args: dict[str, Any], emit: Any) -> Any:
    """Return the logits of a pass without a cache."""
    return importlib.import_module("paged_runs").reference_logits(backend, args["tokens"]).tolist()


CALLS = {
    "step": step,
    "plain": plain,
    "swap_out": lambda backend, args, emit: backend.swap_out(args["pairs"]),
    "swap_in": lambda backend, args, emit: backend.swap_in(args["pairs"]),
    "logits": lambda backend, args, emit: backend.logits().tolist(),
}


def main() -> int:
    """Run the worker script."""
    script = sys.argv.pop(1)
    spec = importlib.util.spec_from_file_location("worker", script)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.CALLS.update(CALLS)
    worker.JOBS["exercise"] = ("paged_runs", "run")
    code: int = worker.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
