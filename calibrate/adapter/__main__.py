"""Run a script of llm-serving with a servesim policy inside the server.

    SERVESIM_POLICY='{"delay_factor": 0.5, "delay_variant": "queue", "preempted_to": "swapped"}' \\
        python -m servesim.calibrate.adapter examples/server_app_post.py --config ...

Instead, the server's script may call `servesim.calibrate.adapter.llm_serving.install()` at its top.
"""

from __future__ import annotations

import runpy
import sys

from .llm_serving import install


def run_script() -> None:
    """Run the script that the first argument names, with the arguments that follow."""
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    install()
    run_script()
