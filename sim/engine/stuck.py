"""When an engine is stuck, and why: the error of a run that cannot go on."""

from __future__ import annotations

from typing import Any, Final

from servesim.core import Stuck

from .server import Server

BUILT_IN: Final = "servesim.policies."  # modules of policies that reproduce real engines


class Progress:
    """Whether the model calls of a server generate tokens."""

    __slots__ = ("_last", "_most", "_server", "_tokens")

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tokens = 0  # so far
        self._last = 0  # the last call that generated one
        self._most = 1000 + server.pool.total * server.pool.block_size  # calls without a token

    def note_call(self, calls: int, now: float) -> None:
        """Note the call with this number. Raise Stuck after too many calls without a token."""
        tokens = self._server.tokens_generated
        if tokens != self._tokens:
            self._tokens, self._last = tokens, calls
        elif calls - self._last > self._most:
            reason = f"no token in the last {calls - self._last} model calls"
            raise stuck(self._server, now, reason, "returned plans that generate none")


def stuck(server: Server, now: float, reason: str, action: str) -> Stuck:
    """Return the error of an engine that can never run again; `action` is what the policy did."""
    return Stuck(reason, server.all_requests(), now, describe_cause(server, action))


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
