"""The base class of routers: it sends each request of a fleet to one replica.

A router is like a policy: its fields are its settings, and it chooses with what it is given. What a real router keeps
between two requests is its memory, an object of its own. The methods `sent`, `prefilled`, `ended` and `reported` change
it; a choice does not. So a recording of a real router can be followed choice by choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Optional
from zlib import crc32

from servesim.core.native import keep_compiled_fields, mypyc_attr

REFUSED = -1  # what `route` returns instead of a replica
CHARACTERS_PER_TOKEN = 4  # of a simulated text; routers that see characters count these


class Run(NamedTuple):
    """Blocks of a text that end in the same piece of it."""

    key: int  # texts with the same key have the same blocks here, as far as both have them
    blocks: int


class Asked:
    """What a router sees of a request. The text is its characters, or pieces of texts: number and characters of each.

    Texts with the same number begin equally. So a router can compare long texts piece by piece.
    """

    __slots__ = ("_pieces", "_runs", "_text", "id", "key", "size", "tokens")

    def __init__(
        self, id: Any, text: Optional[str], tokens: int, key: Optional[str] = None, size: int = 0,
        pieces: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.id = id
        self.tokens = tokens  # of the prompt
        self.key = key  # session, user or routing key
        self.size = size  # bytes of the HTTP body
        self._text = text
        self._pieces = pieces
        self._runs: Optional[dict[tuple[int, bool], list[Run]]] = None

    @property
    def pieces(self) -> Sequence[tuple[int, int]]:
        """The pieces of the text; empty if it is given as characters."""
        return self._pieces

    @property
    def length(self) -> int:
        """The characters of the text."""
        return sum([length for _, length in self.pieces]) if self._text is None else len(self._text)

    @property
    def text(self) -> str:
        """The prompt."""
        if self._text is None:
            self._text = "".join([characters(number, length) for number, length in self.pieces])
        return self._text

    def runs(self, block: int, with_rest: bool = False) -> list[Run]:
        """Return the blocks of this number of characters; `with_rest`: also a shorter one at the end."""
        if self._runs is None:
            self._runs = {}
        known = self._runs.get((block, with_rest))
        if known is not None:
            return known
        found: list[Run] = []
        before, end = 0, 0  # a hash of the pieces before, and their characters
        for number, length in self.pieces or cut(self.text, block):
            key = hash((before, number))
            blocks = (end + length) // block - end // block
            if blocks:
                found.append(Run(key, blocks))
            before, end = hash((key, length)), end + length
        if with_rest and end % block:
            found.append(Run(hash((before, 0, end % block)), 1))
        self._runs[block, with_rest] = found
        return found


def cut(text: str, block: int) -> list[tuple[int, int]]:
    """Return the pieces of a text of which only the characters are known: its blocks. Its `hash` would be random."""
    blocks = [text[start : start + block] for start in range(0, len(text), block)]
    return [(crc32(piece.encode("utf-8", "surrogatepass")), len(piece)) for piece in blocks]


def characters(number: int, count: int) -> str:
    """Return the first characters of a text."""
    word = f"{number}."
    return (word * (count // len(word) + 1))[:count]


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


def nothing_cached(replica: int) -> int:
    """Return 0: what the replica has is not known."""
    return 0


class Fleet:
    """The replicas at the time of a choice."""

    __slots__ = ("cached", "memory", "now", "present")

    def __init__(
        self, now: float, present: Sequence[int], memory: Any, cached: Callable[[int], int] = nothing_cached
    ) -> None:
        self.now = now
        self.present = present  # replicas that may be chosen
        self.memory = memory
        self.cached = cached  # tokens of the request in the prefix cache of a replica, now


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
    def reads_first_tokens(self) -> bool:
        """Whether a choice depends on the first tokens of earlier requests: `prefilled` changes the memory."""
        return False

    @property
    def reads_reports(self) -> bool:
        """Whether a choice depends on what the replicas say about themselves: `reported` changes the memory."""
        return True

    @property
    def reads_caches(self) -> bool:
        """Whether a choice depends on the prefix caches of the replicas (`Fleet.cached`)."""
        return False

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
        return choices[0] if len(choices) == 1 else choices[random_below(random, len(choices))]

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        """Remember a request that goes to a replica."""
        in_flight: list[int] = fleet.memory.in_flight
        in_flight[replica] += 1

    def prefilled(self, memory: Any, request: Asked, replica: int) -> None:
        """Remember that a replica has sent the first token of a request."""

    def ended(self, memory: Any, request: Asked, replica: int) -> None:
        """Remember that the answer to a request has ended."""
        in_flight: list[int] = memory.in_flight
        in_flight[replica] -= 1

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


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class OwnChoices(OwnCounts):
    """A router whose choices do not depend on what the replicas do."""

    @property
    def learns(self) -> bool:
        return False


def random_below(random: Random, limit: int) -> int:
    """Return a random number from 0 to limit - 1, the place that `random.choice` takes, at a third of its time."""
    bits = limit.bit_length()
    number: int = random.getrandbits(bits)
    while number >= limit:
        number = random.getrandbits(bits)
    return number


def fewest(counts: list[int], present: Sequence[int]) -> list[int]:
    """Return the replicas with the lowest count."""
    replicas = list(present)  # compiled, a list is faster
    lowest = counts[replicas[0]]
    for replica in replicas:
        if counts[replica] < lowest:
            lowest = counts[replica]
    return [replica for replica in replicas if counts[replica] == lowest]


def least(scores: list[Any], present: Sequence[int]) -> list[int]:
    """Return the replicas with the lowest score."""
    found: list[int] = []
    lowest = math.inf
    for replica in present:
        score: float = scores[replica]
        if score < lowest:
            lowest, found = score, [replica]
        elif score == lowest:
            found.append(replica)
    return found
