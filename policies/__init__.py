"""Scheduling policies, one module per engine family. POLICIES lists them all.

They need Python 3.9 and the standard library. Policies import `core` only; `config` imports POLICIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from servesim.core import Policy

from .lightllm import LightLLM
from .llm_serving import LLMServing
from .mlfq import MLFQ, SRPT
from .nano_vllm import NanoVLLM
from .orca import Orca
from .sarathi import Sarathi, SarathiAlternating
from .sglang import SGLang
from .splitfuse import SplitFuse
from .static import Static
from .vllm_v0 import VLLM
from .vllm_v0_chunked import VLLMChunked
from .vllm_v1 import VLLMV1

POLICIES: dict[str, type[Policy]] = {
    "llm-serving": LLMServing,
    "vllm": VLLM,
    "vllm-chunked": VLLMChunked,
    "vllm-v1": VLLMV1,
    "nano-vllm": NanoVLLM,
    "static": Static,
    "orca": Orca,
    "sarathi": Sarathi,
    "sarathi-alternating": SarathiAlternating,
    "splitfuse": SplitFuse,
    "lightllm": LightLLM,
    "sglang": SGLang,
    "mlfq": MLFQ,
    "srpt": SRPT,
}
OLD_FIELDS = {  # old name -> new name; input may use either
    "evicted": "preempted_to",
    "serve_first": "refill_from",
    "open_above": "admission_hysteresis",
    "mend_delay": "fix_delay_bugs",
    "mend_flush": "wait_for_flush",
}


def match_fields(kind: type[Policy], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the field names of a policy class. It may have a new or an old name of a field."""
    known = {field.name for field in fields(kind)}
    other = {**OLD_FIELDS, **{new: old for old, new in OLD_FIELDS.items()}}
    names = {key: key if key in known or other.get(key) not in known else other[key] for key in settings}
    duplicates = [key for key, name in names.items() if name != key and name in settings]
    if duplicates:
        raise ValueError(f"{names[duplicates[0]]}: also set under its old name {duplicates[0]}; keep one")
    return {names[key]: value for key, value in settings.items()}
