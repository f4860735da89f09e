"""A worker whose allocator gives one block to two requests: an error that the token check must find.

    python shared_block_worker.py WORKER_SCRIPT [OPTIONS OF THE WORKER]

`worker_python` in stepping_worker.py writes an executable for --worker-python. With it, `sim replay` runs as usual.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def main() -> int:
    """Run the worker script with the broken allocator."""
    script = sys.argv.pop(1)
    spec = importlib.util.spec_from_file_location("worker", script)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.find_packages()
    sys.path.append(str(BENCHMARKS))
    with importlib.import_module("shared_block").broken_allocator():
        code: int = worker.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
