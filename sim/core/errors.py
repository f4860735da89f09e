"""Errors that a user sees: bad input, and an engine that can never run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request


class BadInput(ValueError):
    """Invalid user input. The message is one line: where, what is wrong, what was expected. Exit code 2."""


class Stuck(RuntimeError):
    """The engine can never run again although requests are left (deadlock or livelock)."""

    def __init__(self, reason: str, requests: Sequence[Request], now: float) -> None:
        self.requests = tuple(requests)
        self.now = now
        names = ", ".join(str(request.id) for request in self.requests[:8])
        more = f" and {len(self.requests) - 8} more" if len(self.requests) > 8 else ""
        super().__init__(f"stuck at t={now:g} s: {reason} (requests {names}{more})")
