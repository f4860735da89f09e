"""The input files of an experiment: digests of its traces, user policies and profiles.

A resumed experiment must read the same files: runs on an older and a newer trace must not share one result.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from servesim import __version__
from servesim.config.overrides import Tree
from servesim.config.scenario import Scenario
from servesim.config.user_code import names_file
from servesim.core import BadInput
from servesim.costs.device_profile import load_profile

MISSING = "missing"  # instead of the digest of a file that does not exist


def versions() -> dict[str, str]:
    """Return the versions that the numbers of a run depend on."""
    return {"servesim": __version__, "python": platform.python_version()}


def input_digests(scenarios: Iterable[Tree]) -> dict[str, str]:
    """Return the digest of every file that the scenarios read: `trace X.csv`, `policy own.py`, `profile NAME`."""
    names = sorted({name for tree in scenarios for name in input_names(tree)})
    return {f"{kind} {path}": digest(kind, path) for kind, path in names}


def input_names(tree: Tree) -> Iterable[tuple[str, str]]:
    """Yield the kind and the path of every file that a scenario reads."""
    trace, policy = tree.get("trace"), tree.get("policy")
    profile = tree.get("profile", Scenario.model_fields["profile"].default)
    if isinstance(trace, Mapping):
        yield from (
            (kind, trace[key]) for kind, key in (("trace", "path"), ("tokenizer", "tokenizer")) if trace.get(key)
        )
    elif isinstance(trace, str):
        yield "trace", trace
    name: Any = policy.get("name") if isinstance(policy, Mapping) else policy
    if names_file(name):
        yield "policy", name.rpartition(":")[0] if ".py:" in name else name
    if isinstance(profile, str):
        yield "profile", profile


def digest(kind: str, path: str) -> str:
    """Return a digest of the content of a file or folder."""
    if kind == "profile":
        return load_profile(path).digest
    if path == "-":
        raise BadInput(f"{kind} -: expected a file: many runs read it, and a resumed sweep reads it again")
    start, result = Path(path), hashlib.sha256()
    try:
        files = sorted(file for file in start.rglob("*") if file.is_file()) if start.is_dir() else [start]
        if not files or not all(file.is_file() for file in files):
            return MISSING
        for file in files:
            with file.open("rb") as data:
                while block := data.read(1 << 20):
                    result.update(block)
    except (OSError, ValueError) as error:
        raise BadInput(f"{kind} {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return result.hexdigest()[:16]
