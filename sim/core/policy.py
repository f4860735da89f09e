"""The base class of schedulers, and the orders of the waiting queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Optional

from .plan import Plan
from .request import Request
from .view import View


@dataclass(frozen=True)
class Policy:
    """A scheduler: its fields are the knobs, `decide` is the rule. Pure: no clock, no chance, no hidden state."""

    order: str = "arrival"  # waiting queue: arrival, shortest/longest-output/-prompt/-total, output-groups, priority
    group_width: int = 64  # tokens of output limit a group spans (order output-groups)
    aging: float = 0.0  # priority levels a second of waiting is worth (order priority)
    max_wait: Optional[float] = None  # seconds after which a waiting request goes to the front, None for never

    mirrors: ClassVar[str] = ""  # the engine and version whose rule this is
    proof: ClassVar[str] = "not proven"  # what its decisions were compared with
    running_order: ClassVar[str] = "admission"  # how the engine keeps its batch: admission | arrival | slot
    null_blocks: ClassVar[int] = 0  # blocks of the pool the engine keeps to itself
    refuses: ClassVar[bool] = True  # whether a request that can never fit is refused on arrival
    flushes: ClassVar[bool] = False  # whether finished requests hold their blocks until a plan releases them
    last_token_decodes: ClassVar[bool] = False  # whether the last token of a prompt, left by itself, runs as a decode

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {self.order!r}")
        at_least(self, 1, "group_width")
        at_least(self, 0, "aging", "max_wait")

    def decide(self, view: View) -> Plan:
        """Return what to do now."""
        raise NotImplementedError

    def begin(self) -> Any:
        """Return the memory that the first view carries."""
        return None

    def leap(self, memory: Any, iterations: int) -> Any:
        """Return the memory after so many further iterations of a held plan."""
        return memory

    def rank(self, request: Request) -> Any:
        """Return the key by which waiting is sorted; it may not change while the request waits."""
        return ORDERS[self.order](self, request)

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


# Ageing keeps the order of two waiting requests as it is, since both age alike: the key needs no clock.
ORDERS: dict[str, Any] = {
    "arrival": lambda policy, request: 0,
    "shortest-output": lambda policy, request: request.limit,
    "longest-output": lambda policy, request: -request.limit,
    "shortest-prompt": lambda policy, request: request.prompt,
    "longest-prompt": lambda policy, request: -request.prompt,
    "shortest-total": lambda policy, request: request.prompt + request.limit,
    "longest-total": lambda policy, request: -request.prompt - request.limit,
    "output-groups": lambda policy, request: request.limit // policy.group_width,
    "priority": lambda policy, request: request.priority + policy.aging * request.arrival,
}


def at_least(policy: Policy, least: float, *names: str) -> None:
    """Raise a ValueError that names the first field below its least value."""
    for name in names:
        value = getattr(policy, name)
        if value is not None and not (value >= least and value < math.inf):
            raise ValueError(f"{name}: expected at least {least:g}, got {value!r}")


def one_of(policy: Policy, /, **choices: Sequence[Any]) -> None:
    """Raise a ValueError that names the first field with a value not on its list."""
    for name, allowed in choices.items():
        value = getattr(policy, name)
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
