"""Prompts of live runs and of HTTP clients: contents drawn from a seed, as token ids or as words of one token each.

Prompts share the beginnings that their contents share. All other tokens are new in every request and with every seed:
a server finds only those blocks in its prefix cache that the trace shares.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from servesim.core import Request

# In the vocabulary of nearly all models; the first ones can be special. A token id outside ends vLLM's engine.
TOKEN_IDS = range(100, 1000)
# Each word is one token, with and without a leading space, in the vocabularies of GPT-2, GPT-4, GPT-4o, Llama 2 and
# Llama 3, and in `sim serve`. Its answers consist of them too.
COMMON_WORDS = (
    "that with from have this will they their more said your which about were would other been like them there year "
    "some when than over also part time what just into people work only after play could first back under most again "
    "know need want even these because make then every look where years should right through very being does down "
    "many call before well much those such long think show good start made last count point used same while game "
    "report still here world though take going hand between against high help found person great sign follow find "
    "team system lead around read real support really fact both three each during public power different state head "
    "another child since life develop pass turn second something month government without never level things might "
    "effect allow feel result using best number must direct open post come week place form stand next little mark "
    "invest hard import test rest full care case less list home left better data build main including interest keep "
    "class small plan percent process program name four return called move group current always near free design "
    "change book away able country order million thing school days health friend tell talk until later view word cost "
    "give large important business clear kind mean past season claim within line project control money family making "
    "sure light water times grow company example actually ever major often human available record news hour having "
    "product deal side reason official hold city children once night done working body whether seen"
)
WORDS = tuple(COMMON_WORDS.split())


@dataclass(frozen=True)
class Prompts:
    """Makes the prompts of a run. Equal seeds give equal prompts."""

    seed: str = ""
    vocabulary: Optional[int] = None  # token ids of the model, if known
    answers: dict[Hashable, list[int]] = field(default_factory=dict)  # token ids that the server generated, by name

    def token_ids(self, request: Request) -> list[int]:
        """Return the prompt as token ids. Earlier answers in it are those of the server, if it has sent token ids."""
        last = min(TOKEN_IDS.stop, self.vocabulary or TOKEN_IDS.stop)
        first = TOKEN_IDS.start if last > 2 * TOKEN_IDS.start else 1  # not 0: engines pad with it
        span = last - first
        ids = [first + number % span for number in self._numbers(request, request.prompt)]
        put_answers(ids, request, self.answers)
        return ids

    def words(self, request: Request, added_tokens: int = 0) -> str:
        """Return the prompt as words. A server adds `added_tokens` to the text, so the text is shorter."""
        numbers = self._numbers(request, max(1, request.prompt - added_tokens))
        return " ".join([WORDS[number % len(WORDS)] for number in numbers])

    def _numbers(self, request: Request, tokens: int) -> array[int]:
        """Return one random number per token."""
        if request.content is None:
            return self._draw(f"request {request.id}", tokens)
        numbers = array("H")
        for name, count in request.content.pieces:
            numbers += self._draw(f"text {name!r}", count)
        return numbers[:tokens]

    def _draw(self, name: str, count: int) -> array[int]:
        key = f"{self.seed}/{name}".encode("utf-8", "surrogatepass")
        return array("H", hashlib.shake_128(key).digest(2 * count))  # a shorter digest is a prefix of a longer one


def put_answers(ids: Any, request: Request, answers: Mapping[Hashable, Any]) -> None:
    """Put the known answers to earlier requests into a prompt that contains them, by name."""
    content = request.content
    for name, start, end in () if content is None else zip(content.names, (0, *content.ends), content.ends):
        if name in answers:
            answer = answers[name][: end - start]
            ids[start : start + len(answer)] = answer


UNSEEDED = Prompts()  # contents depend on the ids of the requests only


def new_seed() -> str:
    """Return a seed that no earlier run has used."""
    return str(random.SystemRandom().randrange(10**12))
