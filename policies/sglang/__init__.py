"""SGLang."""

from __future__ import annotations

from servesim.core import Policy

from .policy import SGLang

__all__ = ["POLICIES", "SGLang"]
POLICIES: dict[str, type[Policy]] = {"sglang": SGLang}
