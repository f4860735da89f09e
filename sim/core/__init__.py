"""The types that everything else uses: requests, plans, views, policies, step costs and errors.

Standard library only and Python 3.9, because these modules also load inside a live engine. Lengths are tokens, times
are seconds, memory is KV blocks of `block_size` tokens. An unset value is None, never 0. Every package may import this.
"""

from .content import Content
from .cost import Shape, StepCost, check_seconds
from .errors import BadInput, PlanError, PolicyError, Stuck
from .fields import AtLeast, Float0, Fraction, Int0, Int1
from .plan import (
    DECODE_PAST_FINISH,
    DECODE_UNTIL_FINISH,
    FOREVER,
    IDLE_PLAN,
    NO_HOLD,
    NO_MOVES,
    PAST_FINISH,
    UNTIL_FINISH,
    Chunk,
    Hold,
    Moves,
    Plan,
    Preemption,
    Rejection,
    Reorder,
    Values,
)
from .policy import DECIDE, ORDERS, Policy, field_values, first_time_after, require_effect
from .request import ClientRequest, DecodeCohort, Request
from .sampling import Sampling, SequenceGroup
from .view import NOT_CACHED, BlockPool, CachedPrefix, CacheDraft, Queue, ServerQueue, View

__all__ = [
    "BadInput", "PlanError", "PolicyError", "Stuck",
    "ClientRequest", "Content", "Request", "DecodeCohort", "Sampling", "SequenceGroup",
    "FOREVER", "NO_MOVES", "Chunk", "Hold", "Moves", "Plan", "Preemption", "Rejection", "Reorder", "Values",
    "DECODE_PAST_FINISH", "DECODE_UNTIL_FINISH", "IDLE_PLAN", "NO_HOLD", "PAST_FINISH", "UNTIL_FINISH",
    "NOT_CACHED", "BlockPool", "CachedPrefix", "CacheDraft", "Queue", "ServerQueue", "View",
    "DECIDE", "ORDERS", "Policy", "field_values", "first_time_after", "require_effect",
    "AtLeast", "Float0", "Fraction", "Int0", "Int1",
    "Shape", "StepCost", "check_seconds",
]  # fmt: skip
