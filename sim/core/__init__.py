"""The vocabulary of the project: requests, plans, views, policies, step costs and errors.

Standard library only and Python 3.9, because these modules also load inside a live engine. Lengths are tokens, times
are seconds, memory is blocks of `block_size` tokens. "Not yet" is None, never 0. Every package may import this one.
"""

from .cost import Shape, StepCost
from .errors import BadInput, Stuck
from .plan import FOREVER, Chunk, Eviction, Plan, Rejection
from .policy import ORDERS, Policy, at_least, just_after, one_of, settings
from .request import DecodeCohort, Request
from .view import BlockPool, Queue, View, WaitingQueue

__all__ = [
    "BadInput", "Stuck",
    "Request", "DecodeCohort",
    "FOREVER", "Chunk", "Eviction", "Plan", "Rejection",
    "BlockPool", "Queue", "View", "WaitingQueue",
    "ORDERS", "Policy", "at_least", "just_after", "one_of", "settings",
    "Shape", "StepCost",
]  # fmt: skip
