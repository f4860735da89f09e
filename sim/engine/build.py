"""Build an engine from a policy and the `engine` section of a scenario; the same for simulated and live runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servesim.core import BadInput, Policy, Request

from .inbox import Inbox
from .loop import Driver, Observer
from .server import Server

REFUSES = {"auto": None, "always": True, "never": False}  # engine.refuse; None: as the policy says


def build_server(policy: Policy, engine: Mapping[str, Any]) -> Server:
    """Return the empty server of an engine."""
    blocks: int = engine["num_blocks"]
    if blocks <= policy.null_blocks:
        raise BadInput(f"engine.num_blocks: expected more than {policy.null_blocks}, got {blocks}")
    return Server(
        policy,
        blocks,
        engine["block_size"],
        engine.get("host_blocks", 0),
        engine.get("max_model_len"),
        engine.get("max_generate_length"),
        REFUSES[engine.get("refuse", "auto")],
    )


def build_driver(
    server: Server,
    engine: Mapping[str, Any],
    requests: Sequence[Request],
    observers: Sequence[Observer] = (),
    front_end: float = 0.0,
) -> Driver:
    """Return the driver of a server; `front_end` is a profile's seconds, used where the engine sets none."""
    front = engine.get("front_end") or {}
    seconds = front.get("seconds")
    inbox = Inbox(requests, front.get("lag", 1), front_end if seconds is None else seconds)
    return Driver(server.policy, server, inbox, tuple(observers), bool(front.get("end_lag")))
