"""The interpreter with mindspore and mindformers for the tests: SERVESIM_KBK_PYTHON, else .venv-kbk here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ...conftest import ROOT

SCRIPT = Path(__file__).with_name("kbk_contract.py")


def kbk_python() -> str:
    """Return that interpreter, or skip the test with a reason."""
    python = os.environ.get("SERVESIM_KBK_PYTHON") or str(ROOT / ".venv-kbk" / "bin" / "python")
    if not Path(python).exists():
        pytest.skip(f"no interpreter with mindspore: {python} is absent (make kbk, or set SERVESIM_KBK_PYTHON)")
    probe = "import importlib.util as u, sys; sys.exit(not (u.find_spec('mindspore') and u.find_spec('mindformers')))"
    if subprocess.run([python, "-c", probe], capture_output=True).returncode:
        pytest.skip(f"{python} lacks mindspore or mindformers (make kbk)")
    return python


def run_contract(folder: Path, *sections: str) -> dict[str, Any]:
    """Run sections of kbk_contract.py under that interpreter, in a folder, and return their results."""
    out = folder / "results.json"
    done = subprocess.run(
        [kbk_python(), str(SCRIPT), str(out), *sections], cwd=folder, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, Any] = json.loads(out.read_text())
    return results
