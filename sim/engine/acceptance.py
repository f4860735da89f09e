"""Which drafted tokens the model accepts, by chance: a request has random numbers of its own, under every policy."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final, Optional

from servesim.core import Request

from .drafts import Drafts

Chances = tuple[int, Optional[float], Sequence[float], int, float]  # as JSON: the arguments of `connect_chances`
MASK: Final = 2**64 - 1


def uniform(key: int, name: Any, number: int) -> float:
    """Return the random number from 0 to 1 of a stream, a request and a place in it (the mixer of splitmix64)."""
    mixed = (key + zlib.crc32(str(name).encode()) * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) & MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
    return ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


class Acceptance:
    """How many drafts the model accepts.

    One random number decides about all drafts of a row, so a row with fewer drafts accepts the same first ones.
    """

    def __init__(self, key: int, rate: Optional[float], rates: Sequence[float] = ()) -> None:
        self.key = key  # of the random stream
        self.rate = rate  # of each draft, if those before it are accepted; None: that of the request
        self.rates = rates  # of all drafts up to a position, in place of this rate

    def accept(self, request: Request, drafts: int) -> int:
        """Return how many drafts of the next row of a request are accepted."""
        chance, count = uniform(self.key, request.id, request.draft_rows), 0
        request.draft_rows += 1
        if self.rates:
            while count < drafts and chance < self.rates[count]:
                count += 1
            return count
        rate = request.acceptance if self.rate is None else self.rate
        assert rate is not None, f"{request} has no acceptance"
        bound = rate
        while count < drafts and chance < bound:
            count += 1
            bound *= rate
        return count


class Proposals:
    """In which steps a drafter finds something to propose."""

    def __init__(self, key: int, fraction: float, tokens: int) -> None:
        self.key = key  # of the random stream
        self.fraction = fraction  # of the steps
        self.tokens = tokens  # drafts, if it finds something

    def offer(self, request: Request) -> int:
        """Return how many drafts a request has in its next step."""
        return self.tokens if uniform(self.key, request.id, request.written) < self.fraction else 0


def connect_chances(
    drafts: Drafts, key: int, rate: Optional[float], rates: Sequence[float], proposals_key: int, proposals: float
) -> None:
    """Tell the drafts of a server by which chances the model accepts them, and the drafter finds some."""
    drafts.accept = Acceptance(key, rate, rates).accept
    if proposals < 1:
        drafts.offer = Proposals(proposals_key, proposals, drafts.tokens).offer
