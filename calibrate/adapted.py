"""The 0.1 name of the adapter, kept for server scripts. Importing it installs the policy; `-m` runs a script."""

from __future__ import annotations

from servesim.calibrate.adapter.__main__ import main
from servesim.calibrate.adapter.llm_serving import install

if __name__ == "__main__":
    main()
else:
    install()
