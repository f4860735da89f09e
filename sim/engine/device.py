"""What a live run asks of its device."""

from __future__ import annotations

from typing import Protocol

from .step import Step


class Device(Protocol):
    """Runs the model calls of a live run."""

    def compute(self, step: Step) -> None:
        """Run the model call of a step; with two steps in flight, only launch it."""

    def collect(self, step: Step) -> None:
        """Wait for a call in flight."""
