"""Build an engine from a policy and the `engine` section of a scenario, for simulated and live runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from servesim.core import BadInput, Policy, Request, traits_of

from .clocks import Clock
from .inbox import Inbox
from .loop import Loop, Observer
from .server import Server
from .step import Step

REJECT_OVERSIZED = {"auto": None, "always": True, "never": False}  # None: the traits of the policy decide


def build_server(policy: Policy, engine: Mapping[str, Any]) -> Server:
    """Return a server without requests, from the `engine` section of a scenario."""
    blocks: int = engine["num_blocks"]
    reserved = traits_of(policy).reserved_blocks
    if blocks <= reserved:
        raise BadInput(f"engine.num_blocks: expected more than {reserved} (reserved by this engine), got {blocks}")
    return Server(
        policy,
        blocks,
        engine["block_size"],
        engine.get("host_blocks", 0),
        engine.get("max_model_len"),
        engine.get("max_generate_length"),
        REJECT_OVERSIZED[engine.get("reject_oversized", "auto")],
    )


def build_loop(
    server: Server,
    engine: Mapping[str, Any],
    requests: Sequence[Request],
    clock: Clock,
    observers: Sequence[Observer] = (),
    front_end: float = 0.0,
    compute: Optional[Callable[[Step], None]] = None,
) -> Loop:
    """Return the loop of a server. `front_end`: seconds from the profile, used if the scenario sets none."""
    front = engine.get("front_end") or {}
    seconds = front.get("seconds")
    inbox = Inbox(requests, front.get("lag", 1), front_end if seconds is None else seconds)
    return Loop(server, inbox, clock, tuple(observers), bool(front.get("end_lag")), compute=compute)
