"""Schedulers of papers: Orca and static batches, Sarathi-Serve, Dynamic SplitFuse, LightLLM."""

from .lightllm import LightLLM
from .orca import Orca, Static
from .sarathi import Sarathi, SarathiAlternating
from .splitfuse import SplitFuse

__all__ = ["LightLLM", "Orca", "Sarathi", "SarathiAlternating", "SplitFuse", "Static"]
