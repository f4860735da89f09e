"""Text and tokens of a server without a real vocabulary: a word is a token, w17 is token 17, and back again."""

from __future__ import annotations

import re
import zlib
from typing import Any

NUMBERED = re.compile(r"w(\d{1,9})$")


def tokens_of(text: str, vocab: int) -> list[int]:
    """Return a token for every word."""
    return [token_of(word, vocab) for word in text.split()]


def token_of(word: str, vocab: int) -> int:
    """Return a word's token, never 0."""
    match = NUMBERED.match(word)
    number = int(match[1]) if match else zlib.crc32(word.encode())
    return number % (vocab - 1) + 1 if match is None or number >= vocab else max(1, number)


def text_of(token: int) -> str:
    """Return a token's text, the space before it included."""
    return f" w{token}"


def piece(token: int, last: bool, error: str = "") -> dict[str, Any]:
    """Return a token as llm-serving writes it: the last one has no text, and an error is the text of token 0."""
    return {"id": token, "logprob": 0.0, "special": last, "text": "" if last else error or text_of(token)}


def event(data: Any) -> dict[str, Any]:
    """Wrap data as llm-serving's events are."""
    return {"event": "message", "retry": 30000, "data": data}


def partial(token: dict[str, Any]) -> dict[str, Any]:
    """Return one token's part of an answer."""
    return {"details": None, "generated_text": token["text"], "tokens": token, "top_tokens": [token]}


def whole(tokens: list[dict[str, Any]], reason: str, count: int) -> dict[str, Any]:
    """Return a whole answer."""
    return {
        "generated_text": "".join(token["text"] for token in tokens),
        "finish_reason": reason,
        "generated_tokens": count,
        "prefill": tokens[:1],
        "seed": 0,
        "tokens": tokens,
        "top_tokens": [tokens[:1]],
    }
