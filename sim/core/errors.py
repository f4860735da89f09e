"""Errors that a user sees: bad input, a missing package, a failing policy, a stuck engine, lost workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request


MAX_MESSAGE = 800  # characters


def cut_middle(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters: the middle of a longer one becomes `...`."""
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


class BadInput(ValueError):
    """Invalid user input. The message is one line: where, what is wrong, what was expected. Exit code 2.

    A message can quote a name or a value of any size; it is shortened to MAX_MESSAGE characters.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(cut_middle(" ".join(str(message).splitlines()), MAX_MESSAGE))


class PolicyError(RuntimeError):
    """An error in a user's policy while it runs. The message is one line with FILE:LINE. Exit code 1."""


class PlanError(TypeError):
    """`decide` returned something else than a Plan."""

    def __init__(self, plan: object) -> None:
        super().__init__(plan)  # SimPy makes a copy of an error from its arguments
        self.plan = plan

    def __str__(self) -> str:
        return f"decide returned a {type(self.plan).__name__}, expected a Plan"


class Stuck(RuntimeError):
    """The engine can never run again although requests are left (deadlock or livelock).

    `reason` says what happens, `cause` whether the real engine, a setting or the user's policy is responsible.
    """

    def __init__(self, reason: str, requests: Sequence[Request], now: float, cause: str = "") -> None:
        self.requests = tuple(requests)
        self.now = now
        names = ", ".join(str(request.id) for request in self.requests[:8])
        more = f" and {len(self.requests) - 8} more" if len(self.requests) > 8 else ""
        self._text = f"stuck at t={now:g} s: {reason} (requests {names}{more}){cause and f': {cause}'}"
        super().__init__(reason, self.requests, now, cause)  # SimPy makes the error of a process again from these

    def __str__(self) -> str:
        return self._text


class DeviceFailed(RuntimeError):
    """A device, or the worker process that runs it, failed. Exit code 1."""


class WorkerLost(RuntimeError):
    """The processes that run simulations died repeatedly, or their scheduler is gone. Exit code 1."""


EXTRAS = {  # package -> extra of setup.cfg
    "aiohttp": "replay",
    "prometheus_client": "replay",
    "optuna": "search",
    "distributed": "cluster",
    "pyarrow": "parquet",
    "sentencepiece": "tokenizers",
    "tokenizers": "tokenizers",
    "torch": "torch",
}


def missing_package(package: str) -> str:
    """Return what to do about a package that is not installed."""
    extra = EXTRAS[package]
    return f"needs {package}, the extra `{extra}`: run pip install '.[{extra}]' in the clone of servesim"
