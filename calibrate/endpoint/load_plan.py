"""The loads by which a server that one cannot look into is made to show its step costs.

A single request shows a prompt's time (with the front end's) and the decode of one row; a batch the decode of many; a
burst what prompts take back to back; prompts to a busy server what they add to a step and how long the front end keeps
them. Lengths are tokens, times are seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Optional

from servesim.calibrate.client.protocols import LlmServing, OpenAI
from servesim.core import BadInput, Request

STAGGER = 0.001  # by which a burst comes after its first prompt: it is to find the server at work, not idle
PROBES = 4  # prompts sent to a busy server, one after the other
# One token each, with the space before, in the vocabularies of Llama, Qwen and GPT; and on our own server.
WORDS = (
    "the of and to in is was for that on with by this from at are not have which you were all there been one time "
    "will can out up what about who over new some only could these two may then do first any my now such like people "
    "day way life water world house school state city work old long good great small high left right book road"
)


class Pace(NamedTuple):
    """How fast the server seems to be, for placing requests in time."""

    ttft: float = 0.5
    step: float = 0.05


@dataclass(frozen=True)
class Point:
    """One load of the design: so many requests of one prompt length."""

    kind: str  # single | batch | burst | busy
    rows: int
    prompt: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}x{self.prompt}"

    def requests(self, salt: str, output: int, short: int, pace: Pace) -> list[Request]:
        """Return its requests; the salt makes their prompts unlike any that the server may have cached."""
        if self.kind == "busy":
            return self._busy(salt, output, short, pace)
        written, after = (1, STAGGER) if self.kind == "burst" else (output, 0.0)
        return [Request(f"{salt}/{row}", after if row else 0.0, self.prompt, written) for row in range(self.rows)]

    def _busy(self, salt: str, output: int, short: int, pace: Pace) -> list[Request]:
        """Return streams that keep the server busy, and probes that come one by one at changing phases of a step."""
        probes = [f"{salt}/probe {k}" for k in range(PROBES)]
        background = [Request(f"{salt}/{row}", 0.0, short, 2 * output) for row in range(self.rows)]
        start = 1.2 * self.rows * pace.ttft + 2.0 * pace.step
        after = [None, *probes]
        return background + [
            Request(id, start, self.prompt, 1, after=after[k], delay=(1.1 + 0.3 * k) * pace.step)
            for k, id in enumerate(probes)
        ]


@dataclass(frozen=True)
class Design:
    """Which loads, and how often."""

    lengths: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024, 2048)  # prompts of single requests
    batches: Sequence[int] = (2, 4, 8, 16, 32)  # steady batches
    bursts: Sequence[int] = (2, 4, 8)  # prompts at once
    output: int = 32  # tokens an answer has where decodes are measured
    rounds: int = 3  # times that every load is given
    most: int = 8192  # tokens in the cache at once
    burst: int = 2048  # tokens in a burst: servers that cut prompts into chunks should not have to

    def __post_init__(self) -> None:
        for name, least in (("lengths", 1), ("batches", 1), ("bursts", 2)):
            numbers = getattr(self, name)
            if any(number < least for number in numbers):
                raise BadInput(f"--{name}: expected numbers of at least {least}, got {min(numbers)}")
            object.__setattr__(self, name, tuple(sorted(set(numbers))))
        if not self.lengths:
            raise BadInput("--lengths: expected at least one number, got none")
        bounds = {"output-tokens": (self.output, 8), "rounds": (self.rounds, 1)}
        bounds |= {"most-tokens": (self.most, 64), "burst-tokens": (self.burst, 64)}
        for name, (number, least) in bounds.items():
            if number < least:
                raise BadInput(f"--{name}: expected at least {least}, got {number}")

    @property
    def short(self) -> int:
        """The prompts of loads whose prompts do not matter."""
        return self.lengths[min(1, len(self.lengths) - 1)]

    def points(self) -> list[Point]:
        """Return the loads, small ones of every kind first: what a large one breaks, it does not take from them."""
        singles = [Point("single", 1, prompt) for prompt in self.lengths]
        series = (singles, self._batches(), self._bursts(), self._busy())
        return [point for rank in zip_longest(*series) for point in rank if point is not None]

    def _batches(self) -> list[Point]:
        found = []
        for rows in self.batches:
            long = min(self.lengths[len(self.lengths) // 2], self.most // rows - self.output)
            found += [Point("batch", rows, prompt) for prompt in sorted({self.short, max(self.short, long)})]
        return found

    def _bursts(self) -> list[Point]:
        pairs = [(rows, prompt) for rows in self.bursts for prompt in self._every_other()]
        return [Point("burst", rows, prompt) for rows, prompt in pairs if rows * prompt <= self.burst]

    def _busy(self) -> list[Point]:
        prompts = [prompt for prompt in self._every_other() if prompt <= self.burst]
        few = [Point("busy", 1, prompt) for prompt in prompts]
        rows = [rows for rows in self.batches if 1 < rows <= 8][-1:]
        return few + [Point("busy", rows[0], prompt) for prompt in prompts[1:2] if rows]

    def _every_other(self) -> Sequence[int]:
        return self.lengths[1::2] or self.lengths


class Words(LlmServing):
    """llm-serving, asked with common words instead of numbered ones: a word is a token in most vocabularies."""

    def body(self, request: Request) -> dict[str, Any]:
        return {**super().body(request), "inputs": plain_words(request)}


class TextCompletions(OpenAI):
    """OpenAI's completions of servers that take no token ids."""

    def body(self, request: Request) -> dict[str, Any]:
        return {**super().body(request), "prompt": plain_words(request)}


def plain_words(request: Request) -> str:
    """Return a prompt of so many common words, the same for the same request."""
    return " ".join(random.Random(str(request.id)).choices(WORDS.split(), k=request.prompt))


def numbers(given: Optional[str], option: str, default: Sequence[int]) -> Sequence[int]:
    """Read `16,64,256`."""
    if given is None:
        return default
    try:
        return [int(part) for part in given.split(",") if part.strip()]
    except ValueError:
        raise BadInput(f"{option}: expected whole numbers and commas, got {given!r}") from None
