"""The vocabulary of the project: requests, plans, views, policies, step costs and errors.

Standard library only and Python 3.9, because these modules also load inside a live engine. Lengths are tokens, times
are seconds, memory is blocks of `block_size` tokens. "Not yet" is None, never 0. Every package may import this one.
"""

from .cost import Shape, StepCost
from .errors import BadInput, Stuck
from .plan import FOREVER, NO_MOVES, Chunk, Eviction, Moves, Plan, Rejection
from .policy import ORDERS, Policy, Traits, at_least, just_after, one_of, settings, traits_of
from .request import ClientRequest, DecodeCohort, Request
from .view import BlockPool, Queue, View, WaitingQueue

__all__ = [
    "BadInput", "Stuck",
    "ClientRequest", "Request", "DecodeCohort",
    "FOREVER", "NO_MOVES", "Chunk", "Eviction", "Moves", "Plan", "Rejection",
    "BlockPool", "Queue", "View", "WaitingQueue",
    "ORDERS", "Policy", "Traits", "at_least", "just_after", "one_of", "settings", "traits_of",
    "Shape", "StepCost",
]  # fmt: skip
