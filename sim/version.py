"""The version, and how it is installed: compiled, or as plain Python and why. `sim --version` prints both."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__version__ = "0.4.0"
PACKAGE = Path(__file__).parent


def is_compiled() -> bool:
    """Whether the engine is compiled. It loads no module."""
    return any((PACKAGE / "core" / f"plan{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def describe() -> str:
    """Return the version, and whether it is compiled. setup.py writes plain.txt."""
    note = PACKAGE / "plain.txt"
    reason = f": {note.read_text(encoding='utf-8').strip()}" if note.exists() else ""
    return f"servesim {__version__} ({'compiled' if is_compiled() else 'plain Python' + reason})"
