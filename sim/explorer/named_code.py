"""What a scenario of the page executes (its policy and router, the policies of its pools), and which files it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servesim.config.first_scenario import flow
from servesim.config.layers import Tree, merge, value_at
from servesim.config.paths import paths_in
from servesim.config.registry import ENGINE
from servesim.config.user_code import names_file
from servesim.core import BadInput
from servesim.files.read import OPEN_PIPES

ROUTER = "cluster.router"
PLAIN_FLAGS = ("engine", "order", "scheduling_policy")  # texts of the policy `engine` that name no code


def executed_by(tree: Tree) -> dict[str, str]:
    """Return the keys that name code, with their texts: of the policy, and of the router and the pools of a cluster."""
    found = {f"policy.{key}": text for key, text in code_of_policy(tree).items()}
    cluster = tree.get("cluster")
    if not isinstance(cluster, Mapping):
        return found
    router = value_at(tree, f"{ROUTER}.name")
    found |= {ROUTER: router} if names_file(router) else {}
    pools = cluster.get("pools")
    for number, pool in enumerate(pools if isinstance(pools, list) else []):
        if isinstance(pool, Mapping) and pool.get("policy"):
            own = merge({"policy": tree.get("policy") or {}}, {"policy": pool["policy"]})
            found |= {f"cluster.pools.{number}.policy.{key}": text for key, text in code_of_policy(own).items()}
    return found


def code_of_policy(tree: Tree) -> dict[str, str]:
    """Return the fields of the policy that name code: a policy file, or an installed engine with its classes and files.

    Any text or list of an engine may name code, also in flags that servesim does not know. Numbers and switches do not.
    """
    name, policy = scenario_policy(tree), tree.get("policy")
    if name != ENGINE:
        return {"name": name} if names_file(name) else {}
    fields = policy if isinstance(policy, Mapping) else {}
    texts = {key: value for key, value in fields.items() if not isinstance(value, (bool, int, float, type(None)))}
    return {"name": name, **{str(key): flow(value) for key, value in texts.items() if key not in PLAIN_FLAGS}}


def check_paths(keys: Mapping[str, Any]) -> None:
    """Raise BadInput for standard input and other pipes of the command."""
    for path in paths_in(keys):
        if path == "-" or path.startswith(OPEN_PIPES):
            raise BadInput(f"{path}: expected a file; the page does not read standard input")


def scenario_policy(tree: Tree) -> Any:
    """Return the name of the policy of a scenario."""
    return value_at(tree, "policy.name") or "llm-serving"
