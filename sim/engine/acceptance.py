"""Which drafted tokens the model accepts, by chance: a request has random numbers of its own, under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Optional
from zlib import crc32

from servesim.core import Request
from servesim.core.limits import MAX_DRAFTS

if TYPE_CHECKING:
    from mypy_extensions import i64  # of a number that is never larger: faster in compiled code

Chances = tuple[int, Optional[float], Sequence[float], int, float]  # as JSON: the arguments of `Drafts.connect`
NUMBERS: Final = 2**32  # random numbers of a request: from 0 to the largest one
LARGEST: Final = NUMBERS - 1
MULTIPLIER: Final = 747796405
INCREMENT: Final = 2891336453


class Acceptance:
    """How many drafts the model accepts.

    One random number decides about all drafts of a row, so a row with fewer drafts accepts the same first ones. The
    numbers of a request are a linear congruential sequence: cheap, because every row of a run needs one.
    """

    def __init__(self, key: int, rate: Optional[float], rates: Sequence[float] = (), tokens: int = MAX_DRAFTS) -> None:
        self.start = crc32(f"{key} ".encode())  # key of the random stream
        self.rate = rate  # of each draft, if those before it are accepted; None: that of the request
        self.tokens = tokens  # the most drafts of a row
        if not rates and rate is not None:
            rates = powers(rate, tokens)
        self.by_request = not rates  # they have bounds of their own
        self.bounds = bounds_of(rates[:tokens])  # a smaller number accepts the draft at this position
        self.first: i64 = self.bounds[0]  # faster than the list
        self.second: i64 = self.bounds[1]
        self.third: i64 = self.bounds[2]
        self._bounds_at: dict[float, list[int]] = {}  # by rates of requests

    def accept(self, request: Request, drafts: int) -> int:
        """Return how many drafts of the next row of a request are accepted."""
        luck: i64 = request.luck if request.luck >= 0 else first_luck(self.start, request.id)
        request.luck = (luck * MULTIPLIER + INCREMENT) & LARGEST
        bounds, count = self.bounds_for(request) if self.by_request else self.bounds, 0
        while count < drafts and luck < bounds[count]:
            count += 1
        return count

    def bounds_for(self, request: Request) -> list[int]:
        """Return the bounds of a request with a rate of its own."""
        rate = request.acceptance
        assert rate is not None, f"{request} has no acceptance"
        bounds = self._bounds_at.get(rate)
        if bounds is None:
            bounds = self._bounds_at[rate] = bounds_of(powers(rate, self.tokens))
        return bounds


def first_luck(start: int, name: Any) -> i64:
    """Return the first random number of a request."""
    return mixed((start + (name if isinstance(name, int) else crc32(str(name).encode()))) % NUMBERS)


def mixed(number: i64) -> i64:
    """Return a number to which no other one leads, and which differs in half of its bits from those of neighbours."""
    for _turn in range(3):
        number = ((number ^ (number >> 15)) * MULTIPLIER) & LARGEST
    return number ^ (number >> 15)


def powers(rate: float, count: int) -> list[float]:
    return [rate ** (power + 1) for power in range(count)]


def bounds_of(rates: Sequence[float]) -> list[int]:
    """Return the bounds below which numbers are drawn at these rates; none is above the one before.

    There are at least three; no number is below those of drafts that do not exist.
    """
    return [int(min(rates[: place + 1]) * NUMBERS) for place in range(len(rates))] + [0, 0, 0]


class Proposals:
    """In which steps a drafter finds something to propose."""

    def __init__(self, key: int, fraction: float, tokens: int) -> None:
        self.start = crc32(f"{key} ".encode())  # key of the random stream
        self.bound = int(fraction * NUMBERS)  # smaller numbers find something
        self.tokens = tokens  # drafts, if it finds something

    def offer(self, request: Request) -> int:
        """Return how many drafts a request has in its next step."""
        number = mixed((first_luck(self.start, request.id) + request.written) & LARGEST)
        return self.tokens if number < self.bound else 0
