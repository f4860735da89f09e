"""Importing this puts a policy into the llm-serving of this process: the one file here that acts on import, on purpose.

    SERVESIM_POLICY='{"delay_factor": 0.5, "delay_variant": "queue", "evicted": "swapped"}' \\
        python -m servesim.calibrate.adapted examples/server_app_post.py --config ...

runs a server's script with it; `import servesim.calibrate.adapted` at the top of that script does the same.
"""

from __future__ import annotations

import runpy
import sys

from .adapter import install

install()

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
