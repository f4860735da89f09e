"""The base class of schedulers, and the orders of the waiting queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Optional

from .plan import Plan
from .request import Request
from .view import View

ORDERS = (
    "arrival", "shortest-output", "longest-output", "shortest-prompt", "longest-prompt", "shortest-total",
    "longest-total", "output-groups", "priority",
)  # fmt: skip


class Traits(NamedTuple):
    """Facts about the engine of a policy, which no setting of it changes."""

    engine: str = ""  # the engine and version whose rule this is
    validated_against: str = "not proven"  # what its decisions were compared with
    running_order: str = "admission"  # how the engine keeps its batch: admission | arrival | slot
    reserved_blocks: int = 0  # blocks of the pool that the engine keeps for itself
    rejects_oversized: bool = True  # whether a request that can never fit is rejected on arrival
    frees_blocks_late: bool = False  # whether finished requests hold their blocks until a plan releases them
    last_token_decodes: bool = False  # whether the last token of a prompt, left by itself, runs as a decode


# Class attributes of 0.1 by which a user's policy may still set its traits.
OLD_TRAITS = {
    "mirrors": "engine",
    "proof": "validated_against",
    "running_order": "running_order",
    "null_blocks": "reserved_blocks",
    "refuses": "rejects_oversized",
    "flushes": "frees_blocks_late",
    "last_token_decodes": "last_token_decodes",
}


@dataclass(frozen=True)
class Policy:
    """A scheduler: its fields are the knobs, `decide` is the rule. Pure: no clock, no chance, no hidden state."""

    order: str = "arrival"  # waiting queue: arrival, shortest/longest-output/-prompt/-total, output-groups, priority
    group_width: int = 64  # tokens of output limit a group spans (order output-groups)
    aging: float = 0.0  # priority levels a second of waiting is worth (order priority)
    max_wait: Optional[float] = None  # seconds after which a waiting request goes to the front, None for never

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {self.order!r}")
        at_least(self, 1, "group_width")
        at_least(self, 0, "aging", "max_wait")

    @property
    def traits(self) -> Traits:
        """Facts about the engine; a policy of your own may keep these."""
        return Traits()

    def decide(self, view: View) -> Plan:
        """Return what to do now."""
        raise NotImplementedError

    def begin(self) -> Any:
        """Return the memory that the first view carries."""
        return None

    def leap(self, memory: Any, iterations: int) -> Any:
        """Return the memory after this many further steps of a held plan."""
        return memory

    def rank(self, request: Request) -> Any:
        """Return the key by which waiting is sorted; it may not change while the request waits."""
        return order_key(self, request)

    @property
    def paged(self) -> bool:
        """Whether the engine counts memory at all."""
        return True

    @property
    def ranked(self) -> bool:
        """Whether waiting is kept by rank instead of first come, first served."""
        return self.order != "arrival"

    def but(self, **changes: Any) -> Policy:
        """Return the same policy with some fields changed."""
        return replace(self, **changes)


def traits_of(policy: Policy) -> Traits:
    """Return a policy's traits, with those that its class sets by the attributes of 0.1."""
    old = {new: getattr(policy, name) for name, new in OLD_TRAITS.items() if hasattr(policy, name)}
    return policy.traits._replace(**old)


def order_key(policy: Policy, request: Request) -> float:
    """Return the key of the waiting queue's order; two waiting requests age equally, so it needs no clock."""
    order = policy.order
    if order == "arrival":
        return 0
    if order == "priority":
        return request.priority + policy.aging * request.arrival
    if order == "output-groups":
        return request.limit // policy.group_width
    shortest, _, length = order.partition("-")
    tokens = {"output": request.limit, "prompt": request.prompt, "total": request.prompt + request.limit}[length]
    return tokens if shortest == "shortest" else -tokens


def at_least(policy: Policy, least: float, *names: str) -> None:
    """Raise a ValueError that names the first field below its least value."""
    for name in names:
        value = getattr(policy, name)
        if value is not None and not (value >= least and value < math.inf):
            raise ValueError(f"{name}: expected at least {least:g}, got {value!r}")


def one_of(checked: Policy, /, **choices: Sequence[Any]) -> None:
    """Raise a ValueError that names the first field with a value not on its list."""
    for name, allowed in choices.items():
        value = getattr(checked, name)
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {value!r}")


def settings(policy: Policy) -> dict[str, Any]:
    """Return a policy's fields and values."""
    return {field.name: getattr(policy, field.name) for field in fields(policy)}


def just_after(start: float, wait: float) -> float:
    """Return the first instant at which more than `wait` has passed since `start`, as floats compare."""
    instant = start + wait
    while not instant - start > wait:
        instant = math.nextafter(instant, math.inf)
    return instant
