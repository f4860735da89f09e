"""The 0.1 name of the adapter, kept for server scripts. Importing it installs the policy; `-m` runs a script."""

from __future__ import annotations

from servesim.calibrate.adapter.__main__ import run_script
from servesim.calibrate.adapter.llm_serving import install

install()

if __name__ == "__main__":
    run_script()
