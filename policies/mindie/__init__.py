"""MindIE-LLM."""

from __future__ import annotations

from servesim.core import Policy

from .policy import MindIE

__all__ = ["POLICIES", "MindIE"]
POLICIES: dict[str, type[Policy]] = {"mindie": MindIE}
