"""A copy of the installed package in plain Python, to compare with the compiled one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from servesim.engine import loop

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH with the plain package; skip the test if the installed one is plain too."""
    if str(loop.__file__).endswith(".py"):
        assert os.environ.get("SERVESIM_COMPILE", "") in ("", "0"), "SERVESIM_COMPILE is set, but servesim is plain"
        pytest.skip("needs a compiled installation: `pip install .` with a C compiler")
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, ROOT / "tools" / "plain_copy.py", folder], check=True)
    return folder
