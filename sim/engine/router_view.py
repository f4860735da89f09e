"""What a router sees: the text of a request, and how much of it the prefix cache of each replica has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Final, Optional

from servesim.core import Request
from servesim.routers.router import CHARACTERS_PER_TOKEN, Asked

from .replica import Replica
from .texts import Text

HTTP_BODY: Final = 300  # bytes of a request beside its prompt: model, limits, headers of the message
Pieces = Sequence[tuple[int, int]]


class RouterTexts:
    """Requests as a router sees them. Equal pieces of prompts have equal numbers."""

    def __init__(self, text_of: Optional[Callable[[Request], str]] = None) -> None:
        self._text_of = text_of  # the characters that a client sends; None: pieces of texts
        self._numbers: dict[Any, int] = {}  # name of a text -> its number

    def __call__(self, request: Request) -> Asked:
        if self._text_of is None:
            return SimulatedText(request, self)
        text, size = self._text_of(request), CHARACTERS_PER_TOKEN * request.prompt + HTTP_BODY
        return Asked(request.id, text, request.prompt, request.session, size)

    def pieces(self, request: Request) -> Pieces:
        """Return number and characters of the pieces of a prompt. One without a content is a text of its own."""
        pieces = [(("own", request.id), request.prompt)] if request.content is None else request.content.pieces
        numbers = self._numbers
        return [(numbers.setdefault(name, len(numbers)), CHARACTERS_PER_TOKEN * tokens) for name, tokens in pieces]


class SimulatedText(Asked):
    """A request whose pieces of text are numbered when a router reads them. Few routers do."""

    __slots__ = ("_request", "_texts")

    def __init__(self, request: Request, texts: RouterTexts) -> None:
        size = CHARACTERS_PER_TOKEN * request.prompt + HTTP_BODY
        super().__init__(request.id, None, request.prompt, request.session, size)
        self._request = request
        self._texts = texts

    @property
    def pieces(self) -> Pieces:
        if not self._pieces:
            self._pieces = self._texts.pieces(self._request)
        return self._pieces


class CachedTokens:
    """Tells how many tokens of the request that is routed now each replica has in its prefix cache."""

    __slots__ = ("_replicas", "_request", "_text")

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._request: Optional[Request] = None
        self._text: Optional[Text] = None

    def set_request(self, request: Request) -> None:
        """Answer for another request from now on."""
        self._request, self._text = request, None

    def __call__(self, number: int) -> int:
        request, cache = self._request, self._replicas[number].server.prefix_cache
        if cache is None or request is None or request.content is None:
            return 0
        if self._text is None:
            self._text = Text(request)
        return cache.cached_tokens(self._text, request.prompt)
