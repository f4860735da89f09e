"""Run a script of llm-serving with a servesim policy inside the server.

    SERVESIM_POLICY='{"delay_factor": 0.5, "delay_variant": "queue", "preempted_to": "swapped"}' \\
        python -m servesim.calibrate.adapter examples/server_app_post.py --config ...

In a copy of the folders sim, policies and calibrate, without an installation: `python COPY/calibrate/adapter SCRIPT`.
Instead, the server's script may call `servesim.calibrate.adapter.llm_serving.install()` at its top.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

USAGE = "usage: python -m servesim.calibrate.adapter SCRIPT [ARGUMENT ...]"


def import_from_copy() -> None:
    """Make servesim importable from the folders next to this one, as the worker of a device does."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.join(os.path.dirname(here), "device")
    importlib.import_module("worker").find_packages()  # also removes that folder from sys.path
    del sys.modules["worker"]  # the server may have a module of this name
    sys.path.insert(0, "")  # as `python -m`


def main() -> None:
    """Install the policy and run the script that the first argument names, with the arguments that follow."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(fail(USAGE))
    if not os.path.isfile(sys.argv[1]):
        sys.exit(fail(f"adapter: no script {sys.argv[1]}; {USAGE}"))
    from servesim.calibrate.adapter.llm_serving import install
    from servesim.core import BadInput

    try:
        install()
    except BadInput as error:
        sys.exit(fail(str(error)))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def fail(message: str) -> int:
    """Print one line and return the exit code of bad input."""
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    if not __package__:  # started as a folder
        import_from_copy()
    main()
