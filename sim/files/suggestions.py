"""The known word that a mistyped one is nearest to, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing where no known word is near."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[near[0]]}?" if near else ""
