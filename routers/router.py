"""The base class of routers: it sends each request of a fleet to one replica.

A router is like a policy: its fields are its settings, and it chooses with what it is given. What a real router keeps
between two requests is its memory, an object of its own. The methods `sent`, `prefilled`, `ended` and `reported` change
it; a choice does not. So a recording of a real router can be followed choice by choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Optional

from servesim.core.native import keep_compiled_fields, mypyc_attr

CHARACTERS_PER_TOKEN = 4  # of a simulated text; routers that see characters count these


class Asked:
    """What a router sees of a request."""

    __slots__ = ("id", "key", "size", "text", "tokens")

    def __init__(self, id: Any, text: str, tokens: int, key: Optional[str] = None, size: int = 0) -> None:
        self.id = id
        self.text = text  # the prompt
        self.tokens = tokens  # of the prompt
        self.key = key  # session, user or routing key
        self.size = size  # bytes of the HTTP body


class Replica(NamedTuple):
    """What a replica said about itself, at some time before."""

    waiting: int = 0  # requests in its queue
    running: int = 0
    kv_usage: float = 0.0  # share of its KV blocks in use


@mypyc_attr(allow_interpreted_subclasses=True)
class Memory:
    """What a router knows by itself. A router with more to remember has a subclass."""

    def __init__(self, replicas: int) -> None:
        self.in_flight = [0] * replicas  # requests that it sent and whose answer has not ended
        self.reported: Sequence[Replica] = [Replica()] * replicas


class Fleet:
    """The replicas at the time of a choice."""

    __slots__ = ("memory", "now", "present")

    def __init__(self, now: float, present: Sequence[int], memory: Any) -> None:
        self.now = now
        self.present = present  # replicas that may be chosen
        self.memory = memory


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Router:
    """Chooses replicas. `choices` is a pure function of the request and of the fleet."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        keep_compiled_fields(cls)

    @property
    def learns(self) -> bool:
        """Whether a choice depends on what the replicas do: on ends, first tokens or reports."""
        return True

    @property
    def reads_text(self) -> bool:
        """Whether a choice depends on the text of a request."""
        return False

    @property
    def reads_first_tokens(self) -> bool:
        """Whether a choice depends on the first tokens of earlier requests: `prefilled` changes the memory."""
        return False

    @property
    def reads_reports(self) -> bool:
        """Whether a choice depends on what the replicas say about themselves: `reported` changes the memory."""
        return True

    @property
    def report_interval(self) -> float:
        """Seconds between two reports of the replicas, as the real router gets them."""
        return 0.0

    def memory(self, replicas: int) -> Any:
        """Return the memory before the first request."""
        return Memory(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        """Return the replicas that the rule allows; the real router takes one of them at random."""
        raise NotImplementedError

    def route(self, request: Asked, fleet: Fleet, random: Random) -> int:
        """Return the replica of a request."""
        choices = self.choices(request, fleet)
        return choices[0] if len(choices) == 1 else random.choice(choices)

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        """Remember a request that goes to a replica."""
        fleet.memory.in_flight[replica] += 1

    def prefilled(self, memory: Any, request: Asked, replica: int) -> None:
        """Remember that a replica has sent the first token of a request."""

    def ended(self, memory: Any, request: Asked, replica: int) -> None:
        """Remember that the answer to a request has ended."""
        memory.in_flight[replica] -= 1

    def reported(self, memory: Any, replicas: Sequence[Replica]) -> None:
        """Remember what the replicas said about themselves."""
        memory.reported = replicas


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class OwnCounts(Router):
    """A router that knows only what it has sent itself, and which answers have ended."""

    @property
    def reads_reports(self) -> bool:
        return False


def least(scores: Sequence[float], present: Sequence[int]) -> list[int]:
    """Return the replicas with the lowest score."""
    lowest = min(scores if len(present) == len(scores) else [scores[replica] for replica in present])
    return [replica for replica in present if scores[replica] == lowest]
