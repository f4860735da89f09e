"""Speculative decoding in a live run: what is guessed for each request, and how many guesses the model accepts.

The drafter looks its guesses up in the tokens of the request (ngram). A backend verifies them, or pretends to: then the
acceptance of the scenario says how many count, and their tokens are those of the model.
It runs in the worker: Python 3.9, standard library.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Optional

from servesim.calibrate.device.backend import Backend
from servesim.core import BadInput, Chunk, Request
from servesim.engine.drafts import Drafts

NO_GUESS: Final = array("i")
EMPTY_DRAFT = 1  # token of a draft that the model always rejects
LOOKUP = 5, 5  # most and fewest last tokens that must occur before; the defaults of vLLM


def look_up(tokens: array[int], count: int, most: int = LOOKUP[0], fewest: int = LOOKUP[1]) -> array[int]:
    """Return up to `count` tokens that followed the last ones where these occurred first: as many of them as do."""
    text, size = tokens.tobytes(), tokens.itemsize
    for length in range(min(most, len(tokens) - 1), fewest - 1, -1):
        end = text[-length * size :]
        place = text.find(end, 0, len(text) - size)
        while place % size and place >= 0:  # a match of bytes inside a token
            place = text.find(end, place + 1, len(text) - size)
        if place >= 0:
            start = place // size + length
            return tokens[start : start + count]
    return NO_GUESS


class Verified(NamedTuple):
    """A request with drafts in the step that runs."""

    request: Request
    output: int  # place of its first next token in the result of the step
    guess: array[int]
    drafts: int  # as many, or more that are empty
    offered: int  # before the scheduler used some of them


class LiveDrafts:
    """The drafts of a live run."""

    def __init__(self, drafts: Drafts, pretends: bool) -> None:
        self.most = drafts.tokens
        self.guesses: dict[Request, array[int]] = {}  # for the next step
        self.running: list[Verified] = []
        self.accepted: dict[Request, int] = {}  # in the last step
        self.log: dict[Any, list[tuple[int, int, int]]] = {}  # by request id: tokens before, drafts offered, accepted
        self.pretended = (drafts.accept, drafts.offer) if pretends else None

    def guess(self, request: Request, tokens: array[int]) -> int:
        """Guess the next tokens of a request; return how many."""
        if self.pretended is None:
            guess = look_up(tokens, self.most)
        else:
            offer = self.pretended[1]
            guess = array("i", [EMPTY_DRAFT] * (self.most if offer is None else offer(request)))
        self.guesses[request] = guess
        return len(guess)

    def add(self, chunk: Chunk, output: int) -> array[int]:
        """Return the drafts of a chunk, and expect the next tokens from this place on."""
        request, count = chunk.request, chunk.drafts
        guess = self.guesses[request][:count] if count <= request.drafts else NO_GUESS
        self.running.append(Verified(request, output, guess, count, request.drafts))
        return guess + array("i", [EMPTY_DRAFT] * (count - len(guess)))

    def verify(self, tokens: Sequence[int], rows: list[Optional[Request]], history: dict[Request, array[int]]) -> None:
        """Count how many guesses are right. Remove the request from rows whose token it does not get."""
        for request, output, guess, drafts, offered in self.running:
            written, accepted = len(history[request]) - request.prompt, 0
            if self.pretended is not None:
                accepted = min(self.pretended[0](request, len(guess)), len(guess)) if guess else 0
            else:
                while accepted < len(guess) and tokens[output + accepted] == guess[accepted]:
                    accepted += 1
            self.accepted[request] = accepted
            self.log.setdefault(request.id, []).append((written, offered, accepted))
            kept = min(1 + accepted, request.stop_at - written)
            rows[output + kept : output + 1 + drafts] = [None] * (1 + drafts - kept)
        self.running.clear()


def live_drafts(drafts: Drafts, steps_in_flight: int, backend: Backend, method: str) -> LiveDrafts:
    """Return the drafts of a live run. Raise BadInput if this backend cannot run them."""
    if not backend.speculation:
        raise BadInput(f"speculative: backend {backend.name} does not verify drafts, expected torch or fake")
    if steps_in_flight > 1:
        raise BadInput("speculative: a live run has no steps in flight with drafts; set async_scheduling: false")
    pretends = backend.speculation == "pretended"
    if not pretends and method != "ngram":
        raise BadInput(f"speculative.method: expected ngram, which is the drafter of a live run, got {method}")
    return LiveDrafts(drafts, pretends)
