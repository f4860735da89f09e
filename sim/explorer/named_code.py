"""What a scenario of the page executes, wherever it is named, and which files it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servesim.config.first_scenario import flow
from servesim.config.layers import Tree, as_section, merge, texts_in, value_at
from servesim.config.paths import paths_in
from servesim.config.registry import ENGINE
from servesim.config.user_code import names_file
from servesim.core import BadInput
from servesim.files.read import OPEN_PIPES

ROUTER = "cluster.router"
PLAIN_FLAGS = ("engine", "order", "scheduling_policy")  # texts of the policy `engine` that name no code


def executed_by(tree: Tree) -> dict[str, str]:
    """Return the keys that name code, with their texts: every text that names a Python file, and installed engines."""
    pools, own = value_at(tree, "cluster.pools"), tree.get("policy") or {}
    sections = {"policy": {"policy": own}}
    for number, pool in enumerate(pools if isinstance(pools, list) else []):
        if isinstance(pool, Mapping) and pool.get("policy"):
            sections[f"cluster.pools.{number}.policy"] = merge({"policy": own}, {"policy": pool["policy"]})
    flags = {key: flags_of_engine(section) for key, section in sections.items()}
    found = {f"{key}.{flag}": text for key, named in flags.items() for flag, text in named.items()}
    return found | {key: text for key, text in texts_in(tree).items() if names_file(text)}


def flags_of_engine(tree: Tree) -> dict[str, str]:
    """Return the flags of the policy that name code, if it is an installed engine.

    Any text in a flag may name code, also in flags that servesim does not know. Numbers and switches do not.
    """
    if scenario_policy(tree) != ENGINE:
        return {}
    flags = {"name": ENGINE, **as_section("policy", tree["policy"])}
    return {str(key): flow(value) for key, value in flags.items() if key not in PLAIN_FLAGS and texts_in(value)}


def check_paths(keys: Mapping[str, Any]) -> None:
    """Raise BadInput for standard input and other pipes of the command."""
    for path in paths_in(keys):
        if path == "-" or path.startswith(OPEN_PIPES):
            raise BadInput(f"{path}: expected a file; the page does not read standard input")


def scenario_policy(tree: Tree) -> Any:
    """Return the name of the policy of a scenario."""
    return value_at(tree, "policy.name") or "llm-serving"
