"""Schedulers of papers: Orca and static batches, Sarathi-Serve, Dynamic SplitFuse, LightLLM."""

from __future__ import annotations

from servesim.core import Policy
from servesim.policies.mlfq import MLFQ, SRPT
from servesim.policies.nano_vllm import NanoVLLM

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
    "nano-vllm": NanoVLLM,
    "mlfq": MLFQ,
    "srpt": SRPT,
}
