"""The types that everything else uses: requests, plans, views, policies, step costs and errors.

Standard library only and Python 3.9, because these modules also load inside a live engine. Lengths are tokens, times
are seconds, memory is KV blocks of `block_size` tokens. An unset value is None, never 0. Every package may import this.
"""

from .cost import Shape, StepCost, check_seconds
from .errors import BadInput, PlanError, PolicyError, Stuck
from .plan import FOREVER, NO_MOVES, Chunk, Eviction, Moves, Plan, Preemption, Rejection
from .policy import (
    ORDERS,
    Policy,
    Traits,
    field_values,
    first_time_after,
    require_at_least,
    require_effect,
    require_one_of,
    traits_of,
)
from .request import ClientRequest, DecodeCohort, Request
from .view import BlockPool, Queue, ServerQueue, View

# Names of servesim 0.1.
at_least, one_of, settings, just_after = require_at_least, require_one_of, field_values, first_time_after

__all__ = [
    "BadInput", "PlanError", "PolicyError", "Stuck",
    "ClientRequest", "Request", "DecodeCohort",
    "FOREVER", "NO_MOVES", "Chunk", "Eviction", "Moves", "Plan", "Preemption", "Rejection",
    "BlockPool", "Queue", "ServerQueue", "View",
    "ORDERS", "Policy", "Traits", "field_values", "first_time_after", "require_at_least", "require_effect",
    "require_one_of", "traits_of",
    "Shape", "StepCost", "check_seconds",
]  # fmt: skip
