"""The base class of policies (schedulers), and the orders of the waiting queue."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, Optional, get_args

from .fields import Float0, Int1, check_fields
from .native import keep_compiled_fields, mypyc_attr
from .plan import FOREVER, Plan
from .request import Request
from .view import BlockPool, View

Order = Literal[
    "arrival", "shortest-output", "longest-output", "shortest-prompt", "longest-prompt", "shortest-total",
    "longest-total", "output-groups", "priority",
]  # fmt: skip
ORDERS: Final[tuple[str, ...]] = get_args(Order)
DECIDE: Final = "decide"  # ends a held plan, see Policy.held_state


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Policy:
    """A scheduler. Its fields are its settings; `decide` plans one step.

    `decide` is a pure function of the view: it has no clock of its own, no random numbers and no hidden state.
    """

    # waiting queue: arrival, priority, output-groups, (shortest|longest)-(output|prompt|total)
    order: Order = "arrival"
    group_width: Int1 = 64  # width of one group of output limits, in tokens (order output-groups)
    aging: Float0 = 0.0  # the priority number of a waiting request falls by this much per second (order priority)
    max_wait: Optional[Float0] = None  # seconds until a request moves to the front of a sorted queue; null: never

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        keep_compiled_fields(cls)

    def __post_init__(self) -> None:
        """Check all fields by their types. A subclass adds what types cannot say, for example relations."""
        check_fields(self)

    def rules(self) -> Any:
        """Return the rules of the engine that the policy reproduces (EngineRules); None: it reproduces no engine."""
        return None

    def decide(self, view: View) -> Plan:
        """Return the plan of the next step."""
        raise NotImplementedError

    def initial_state(self) -> Any:
        """Return the policy state of the first view."""
        return None

    def held_state(self, state: Any, now: float) -> Any:
        """Return the policy state after one further step of a held plan, decided now; DECIDE: the plan may change."""
        return state

    def remark(self, state: Any) -> str:
        """Return what a command says about a run that has ended with this policy state."""
        return ""

    def sort_key(self, request: Request) -> Any:
        """Return the sort key of a waiting request. The key must not change while the request waits."""
        return order_key(self, request)

    @property
    def uses_block_pool(self) -> bool:
        """Whether the engine allocates KV blocks. If not, the pool has no limit."""
        return True

    def max_output(self, prompt: int, pool: BlockPool, max_model_len: Optional[int]) -> int:
        """Return how many tokens the engine generates at most for a prompt; below 0: it rejects the request."""
        return FOREVER if max_model_len is None else max_model_len - prompt

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        """Return why the real engine does not start with these settings; empty if it starts, or if there is none."""
        return []

    @property
    def is_sorted(self) -> bool:
        """Whether the waiting queue is sorted by `sort_key`. If not, it is first come, first served."""
        return self.order != "arrival"

    def replace(self, **changes: Any) -> Policy:
        """Return the same policy with some fields changed."""
        return replace(self, **changes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through the constructor: nothing can set the fields of a compiled frozen object."""
        return type(self), tuple(field_values(self).values())


def order_key(policy: Policy, request: Request) -> float:
    """Return the sort key of `policy.order`. All requests age at the same rate, so the key does not depend on time."""
    order = policy.order
    if order == "arrival":
        return 0
    if order == "priority":
        return request.priority + policy.aging * request.arrival
    if order == "output-groups":
        return request.limit // policy.group_width
    if order.endswith("output"):
        tokens = request.limit
    elif order.endswith("prompt"):
        tokens = request.prompt
    else:
        tokens = request.prompt + request.limit
    return tokens if order.startswith("shortest") else -tokens


def require_effect(policy: Policy, has_effect: bool, needs: str, *names: str) -> None:
    """Raise a ValueError that names the first field that is set but has no effect without what it needs.

    For a field that is the main setting of a feature. A detail of a feature that is off is no error: a sweep may vary
    whether the feature is on.
    """
    if has_effect:
        return
    for field in fields(policy):
        value = getattr(policy, field.name)
        if field.name in names and value != field.default:
            raise ValueError(f"{field.name}: expected {field.default!r}, or {needs} too, got {value!r}")


def field_values(policy: Policy) -> dict[str, Any]:
    """Return the fields of a policy and their values."""
    return {field.name: getattr(policy, field.name) for field in fields(policy)}


def first_time_after(start: float, wait: float) -> float:
    """Return the first float time t with t - start > wait."""
    time = start + wait
    while not time - start > wait:
        time = math.nextafter(time, math.inf)
    return time
