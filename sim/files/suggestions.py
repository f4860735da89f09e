"""Suggest the known word that is closest to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or an empty string if no known word is similar."""
    names = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[matches[0]]}?" if matches else ""
