"""What changes in a fleet while it runs: faults of replicas, and a rule that adds and removes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional


class Fault(NamedTuple):
    """What happens to a replica at a time."""

    at: float
    replica: int
    kind: str  # crash | restart: it finishes its requests first | slow
    recover: Optional[float] = None  # seconds until it is as before; None: never
    factor: float = 1.0  # of the step times, if it is slow


class Scaling(NamedTuple):
    """Adds a replica of a pool if more than `target_queue` requests wait per replica; removes one if none waits."""

    replicas: Sequence[int]  # their numbers
    min: int
    max: int
    target_queue: float
    interval: float  # seconds between two decisions
    start_up: float  # seconds until a new replica serves


class Start(NamedTuple):
    """Starts a replica, which serves after some seconds."""

    seconds: float


class Changes(NamedTuple):
    """What changes in a fleet while it runs."""

    faults: Sequence[Fault] = ()
    retry: bool = True
    detect: float = 0.0  # seconds until the router notices that a replica is gone, or is back
    scaling: Sequence[Scaling] = ()
