"""The schedulers of vllm-ascend and vllm-mindspore, plug-ins of vLLM V1."""

from .queues import AscendBatchJobs, AscendShortFirst
from .v1 import AscendBalance, AscendDynamicBatch, AscendProfilingChunk, AscendRecompute
from .whole_prompts import VLLMAscend, VLLMMindSpore

__all__ = [
    "AscendBalance",
    "AscendBatchJobs",
    "AscendDynamicBatch",
    "AscendProfilingChunk",
    "AscendRecompute",
    "AscendShortFirst",
    "VLLMAscend",
    "VLLMMindSpore",
]
