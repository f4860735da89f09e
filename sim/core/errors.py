"""Errors that a user sees: bad input, and an engine that can never run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request


class BadInput(ValueError):
    """The user gave something unusable: one line that says what, where, and what was expected. Exit code 2."""


class Stuck(RuntimeError):
    """Nothing can ever run again although requests are left."""

    def __init__(self, why: str, requests: Sequence[Request], now: float) -> None:
        self.requests = tuple(requests)
        self.now = now
        names = ", ".join(str(request.id) for request in self.requests[:8])
        more = f" and {len(self.requests) - 8} more" if len(self.requests) > 8 else ""
        super().__init__(f"stuck at t={now:g} s: {why} (requests {names}{more})")
