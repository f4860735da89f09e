"""Scheduling policies: one folder per engine family. To remove a family, delete its folder and its line in FAMILIES.

`__init__.py` of a folder lists its policies and how they were validated, presets/ has its presets; docs/structure.md
describes the other files. Policies need Python 3.9 and the standard library. They import
`core`, and `engine` for rules and KV caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

if TYPE_CHECKING:
    from servesim.core import Policy

    POLICIES: dict[str, type[Policy]]

FAMILIES: dict[str, Optional[str]] = {  # folder -> server of `sim export` that runs its policies
    "vllm_v1": "vllm",
    "vllm_v0": "vllm",
    "vllm_ascend": "vllm",  # its policies are subclasses of vllm_v1
    "sglang": "sglang",
    "mindie": "mindie",
    "llm_serving": "llm-serving",
    "papers": None,
}


class Validation(NamedTuple):
    """How policies of engines with common code were validated."""

    recordings: Mapping[str, Mapping[str, int]]  # policy -> version of its engine -> recordings of that version
    not_modelled: str
    modified: Sequence[str] = ()  # presets of engines that their authors changed: no recording shows their rules


def __getattr__(name: str) -> Any:
    """Load POLICIES, the policies of all families by name, on first use: `sim --help` does not need them."""
    if name != "POLICIES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    known: dict[str, type[Policy]] = {}
    for family in FAMILIES:
        known.update(import_module(f".{family}", __name__).POLICIES)
    globals()[name] = known
    return known
