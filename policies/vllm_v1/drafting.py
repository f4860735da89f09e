"""What the method of speculative decoding changes for the scheduler of vLLM V1."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple


class Drafting(NamedTuple):
    """The numbers that the scheduler sees of a method."""

    tokens: int = 0  # drafts of a request per step
    lookahead: int = 0  # places for the keys and values that the drafter writes
    slots: int = 0  # inputs of the drafter per request, beside its tokens
    drops_last_hit: bool = False  # the drafter needs the block before the first new token
    prefill_lookahead: int = 0  # a chunk never ends fewer tokens than this before the end


NO_DRAFTS: Final = Drafting()


@lru_cache
def drafting_of(method: str, tokens: int, modules: int) -> Drafting:
    """Return the numbers of a method with this number of drafts. Every decision asks for them."""
    if not tokens:
        return NO_DRAFTS
    if method == "ngram":
        return Drafting(tokens)
    if method == "draft_model":
        return Drafting(tokens, tokens, 1)
    return Drafting(tokens, tokens, 0, True, tokens if method == "mtp" and modules > 1 else 1)
