"""Prompts of the HTTP clients: contents drawn from a seed, as token ids or as words of one token each.

Requests with equal hash ids share the blocks of these ids. All other tokens are new in every request and with every
seed: a server finds only those blocks in its prefix cache that the trace shares.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from dataclasses import dataclass
from typing import Optional

from servesim.core import Request

DEFAULT_BLOCK = 16  # tokens per hash id, if the trace does not say
TOKEN_IDS = range(100, 10_000)  # valid for any model
# Each word, with its leading space, is one token in the vocabularies of Llama 2, Llama 3 and GPT, and in `sim serve`.
COMMON_WORDS = (
    "the of and to in is was for that on with by this from at are not have which you were all there been one time "
    "will can out up what about who over new some only could these two may then do first any my now such like people "
    "day way life water world house school state city work old long good great small high left right book road"
)
WORDS = tuple(COMMON_WORDS.split())


@dataclass(frozen=True)
class Prompts:
    """Makes the prompts of a run. Equal seeds give equal prompts."""

    seed: str = ""
    block: Optional[int] = None  # prompt tokens per hash id

    def token_ids(self, request: Request) -> list[int]:
        """Return the prompt as token ids."""
        first, span = TOKEN_IDS.start, len(TOKEN_IDS)
        return [first + number % span for number in self._numbers(request, request.prompt)]

    def words(self, request: Request, added_tokens: int = 0) -> str:
        """Return the prompt as words. A server adds `added_tokens` to the text, so the text is shorter."""
        numbers = self._numbers(request, max(1, request.prompt - added_tokens))
        return " ".join([WORDS[number % len(WORDS)] for number in numbers])

    def _numbers(self, request: Request, tokens: int) -> array[int]:
        """Return one random number per token."""
        numbers = array("H")
        block = self.block or DEFAULT_BLOCK
        for id in request.prefix_hashes:
            if len(numbers) == tokens:
                return numbers
            numbers += self._draw(f"hash id {id}", min(block, tokens - len(numbers)))
        return numbers + self._draw(f"request {request.id}", tokens - len(numbers))

    def _draw(self, name: str, count: int) -> array[int]:
        key = f"{self.seed}/{name}".encode("utf-8", "surrogatepass")
        return array("H", hashlib.shake_128(key).digest(2 * count))  # a shorter digest is a prefix of a longer one


UNSEEDED = Prompts()  # contents depend on the ids of the requests only


def new_seed() -> str:
    """Return a seed that no earlier run has used."""
    return str(random.SystemRandom().randrange(10**12))
