"""Schedulers of papers: Orca and static batches, Sarathi-Serve, Dynamic SplitFuse, LightLLM."""

from __future__ import annotations

from servesim.core import Policy

from .lightllm import LightLLM
from .orca import Orca, Static
from .sarathi import Sarathi, SarathiAlternating
from .splitfuse import SplitFuse

__all__ = ["POLICIES", "LightLLM", "Orca", "Sarathi", "SarathiAlternating", "SplitFuse", "Static"]
POLICIES: dict[str, type[Policy]] = {
    "static": Static,
    "orca": Orca,
    "sarathi": Sarathi,
    "sarathi-alternating": SarathiAlternating,
    "splitfuse": SplitFuse,
    "lightllm": LightLLM,
}
