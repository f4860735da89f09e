"""What the method of speculative decoding changes for the scheduler of vLLM V1."""

from __future__ import annotations

from typing import Final


class Drafting:
    """The numbers that the scheduler sees of a method."""

    __slots__ = ("drops_last_hit", "lookahead", "method", "modules", "prefill_lookahead", "slots", "tokens")

    def __init__(
        self, tokens: int = 0, lookahead: int = 0, slots: int = 0, drops_last_hit: bool = False,
        prefill_lookahead: int = 0,
    ) -> None:  # fmt: skip
        self.method, self.modules = "", 1
        self.tokens = tokens  # drafts of a request per step
        self.lookahead = lookahead  # places for the keys and values that the drafter writes
        self.slots = slots  # inputs of the drafter per request, beside its tokens
        self.drops_last_hit = drops_last_hit  # the drafter needs the block before the first new token
        self.prefill_lookahead = prefill_lookahead  # a chunk never ends fewer tokens than this before the end


NO_DRAFTS: Final = Drafting()
KNOWN: Final[list[Drafting]] = []  # every decision asks for them


def drafting_of(method: str, tokens: int, modules: int) -> Drafting:
    """Return the numbers of a method with this number of drafts."""
    if not tokens:
        return NO_DRAFTS
    for known in KNOWN:  # compiled, this is faster than a dictionary
        if known.tokens == tokens and known.modules == modules and known.method == method:
            return known
    drafting = _drafting_of(method, tokens, modules)
    drafting.method, drafting.modules = method, modules
    KNOWN.append(drafting)
    return drafting


def _drafting_of(method: str, tokens: int, modules: int) -> Drafting:
    if method == "ngram":
        return Drafting(tokens)
    if method == "draft_model":
        return Drafting(tokens, tokens, 1)
    return Drafting(tokens, tokens, 0, True, tokens if method == "mtp" and modules > 1 else 1)
