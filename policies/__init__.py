"""Scheduling policies: one folder per engine family. To remove a family, delete its folder and its entry in FAMILIES.

`__init__.py` of a folder says how its policies were validated, presets/ has its presets; docs/structure.md
describes the other files. Policies need Python 3.9 and the standard library. They import
`core`, and `engine` for rules and KV caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

from servesim.core.class_table import ClassTable

if TYPE_CHECKING:
    from servesim.core import Policy


class Family(NamedTuple):
    """The policies of a folder."""

    server: Optional[str]  # of `sim export` that runs them
    policies: Mapping[str, str]  # name -> class
    config_key: str = ""  # key that only a configuration of its server has; config_file.py then reads such a file


FAMILIES = {
    "vllm_v1": Family("vllm", {"vllm-v1": "VLLMV1"}),
    "vllm_v0": Family("vllm", {"vllm": "VLLM", "vllm-chunked": "VLLMChunked"}),
    "vllm_ascend": Family("vllm", {  # subclasses of vllm_v1
        "vllm-ascend": "VLLMAscend",
        "vllm-ascend-dynamic-batch": "AscendDynamicBatch",
        "vllm-ascend-short-first": "AscendShortFirst",
        "vllm-ascend-batch-jobs": "AscendBatchJobs",
        "vllm-ascend-profiling-chunk": "AscendProfilingChunk",
        "vllm-ascend-recompute": "AscendRecompute",
        "vllm-ascend-balance": "AscendBalance",
        "vllm-mindspore": "VLLMMindSpore",
    }),
    "sglang": Family("sglang", {"sglang": "SGLang"}),
    "mindie": Family("mindie", {"mindie": "MindIE"}, "BackendConfig"),
    "llm_serving": Family("llm-serving", {"llm-serving": "LLMServing"}, "model_config"),
    "papers": Family(None, {
        "static": "Static",
        "orca": "Orca",
        "sarathi": "Sarathi",
        "sarathi-alternating": "SarathiAlternating",
        "splitfuse": "SplitFuse",
        "lightllm": "LightLLM",
    }),
}  # fmt: skip
PLACES = {name: f"{folder}.{kind}" for folder, family in FAMILIES.items() for name, kind in family.policies.items()}
POLICIES: ClassTable[Policy] = ClassTable(__name__, PLACES)


class Validation(NamedTuple):
    """How policies of engines with common code were validated."""

    recordings: Mapping[str, Mapping[str, int]]  # policy -> version of its engine -> recordings of that version
    not_modelled: str
    modified: Sequence[str] = ()  # presets of engines that their authors changed: no recording shows their rules
