"""Build a server and its loop from the `engine` section of a scenario."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from servesim.core import BadInput, Policy, Request

from .clocks import Clock
from .device import Device
from .inbox import Inbox
from .loop import Loop
from .notices import Observer
from .rules import rules_of
from .server import Server

REJECT_OVERSIZED = {"auto": None, "always": True, "never": False}  # None: the rules of the engine decide


def build_server(policy: Policy, engine: Mapping[str, Any]) -> Server:
    """Return a server without requests, from the `engine` section of a scenario."""
    blocks: int = engine["num_blocks"]
    reserved = rules_of(policy).reserved_blocks
    if blocks <= reserved:
        raise BadInput(f"engine.num_blocks: expected more than {reserved} (reserved by this engine), got {blocks}")
    server = Server(
        policy,
        blocks,
        engine["block_size"],
        engine.get("host_blocks", 0),
        engine.get("max_model_len"),
        (engine.get("host_cache") or {}).get("blocks", 0),
        () if engine.get("kv_cache_groups") in (None, [None]) else tuple(engine["kv_cache_groups"]),
    )
    server.limits.change(engine.get("max_generate_length"), REJECT_OVERSIZED[engine.get("reject_oversized", "auto")])
    return server


def build_loop(
    server: Server,
    engine: Mapping[str, Any],
    requests: Iterable[Request],
    clock: Clock,
    observers: Sequence[Observer] = (),
    device: Optional[Device] = None,
) -> Loop:
    """Return the loop of a server, from the `engine` section of a scenario."""
    front = engine.get("front_end") or {}
    inbox = Inbox(
        requests, front.get("lag", 1), front.get("seconds") or 0.0, front.get("per_request") or 0.0,
        bool(front.get("end_lag")), front.get("per_token") or 0.0, engine.get("client_delay") or 0.0,
        engine.get("client_timeout") if server.rules.aborts_lost else None,
    )  # fmt: skip
    if engine.get("empty_step") is not None:
        server.rules.empty_step = engine["empty_step"]
    return Loop(server, inbox, clock, tuple(observers), False, device)
