"""Why an engine is stuck, for the error of a run that cannot go on."""

from __future__ import annotations

from typing import Any, Final

from .server import Server

BUILT_IN: Final = "servesim.policies."  # modules of policies that reproduce real engines


def describe_cause(server: Server, action: str) -> str:
    """Return the cause of a stuck engine. `action` is what the policy did, e.g. `returned no work`."""
    policy, rules = server.policy, server.rules
    kind: Any = type(policy)  # mypyc does not know `__module__` of a class
    text = describe_oversized(server)
    if not kind.__module__.startswith(BUILT_IN):
        return f"{text}your policy {kind.__name__} {action}"
    if rules.rejects_oversized and not server.limits.rejects_oversized:
        return f"{text}the real engine rejects such requests, engine.reject_oversized: never keeps them"
    if not rules.engine:
        return f"{text}the built-in policy {kind.__name__} {action}"
    return f"{text}the real engine does this too (rules of {rules.engine})"


def describe_oversized(server: Server) -> str:
    """Return the first waiting request that needs more blocks than the engine has, as the start of a sentence."""
    pool = server.pool
    for request in server.waiting:
        need = server.limits.blocks_for(request.prompt + request.written)
        if need > pool.total:
            return f"request {request.id} needs {need} blocks, the engine has {pool.total}; "
    return ""
