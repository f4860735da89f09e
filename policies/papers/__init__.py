"""Schedulers of papers: Orca and static batches, Sarathi-Serve, Dynamic SplitFuse, LightLLM."""

from __future__ import annotations

from servesim.policies import Validation

from .lightllm import LightLLM
from .orca import Orca, Static
from .sarathi import Sarathi, SarathiAlternating
from .splitfuse import SplitFuse

__all__ = ["VALIDATION", "LightLLM", "Orca", "Sarathi", "SarathiAlternating", "SplitFuse", "Static"]
VALIDATION: dict[str, Validation] = {  # recordings per version, and what is not modelled
    "Sarathi-Serve": Validation(
        {"sarathi": {"96f9911": 2}, "sarathi-alternating": {"96f9911": 0}, "static": {"96f9911": 2}},
        "pipeline parallelism",
    ),
    "LightLLM": Validation({"lightllm": {"4b037f68": 5}}, "prompt cache, versions after April 2024"),
    "others": Validation({"splitfuse": {"8abdd98": 3}, "orca": {"OSDI 2022": 0}}, "pipeline parallelism"),
}
