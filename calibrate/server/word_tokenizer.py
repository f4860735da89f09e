"""Tokenizer for models without a real vocabulary: one word is one token, and `w17` is token 17.

It also builds the JSON objects of llm-serving's responses.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

NUMBERED_WORD = re.compile(r"w(\d{1,9})$")


def encode(text: str, vocab: int) -> list[int]:
    """Return one token per word."""
    return [encode_word(word, vocab) for word in text.split()]


def encode_word(word: str, vocab: int) -> int:
    """Return the token of a word; never 0."""
    match = NUMBERED_WORD.match(word)
    number = int(match[1]) if match else zlib.crc32(word.encode())
    return number % (vocab - 1) + 1 if match is None or number >= vocab else max(1, number)


def decode_token(token: int) -> str:
    """Return the text of a token, with a leading space."""
    return f" w{token}"


def token_event(token: int, last: bool, error: str = "") -> dict[str, Any]:
    """Return a token in llm-serving's form. The last one has no text; an error is the text of token 0."""
    return {"id": token, "logprob": 0.0, "special": last, "text": "" if last else error or decode_token(token)}


def wrap_event(data: Any) -> dict[str, Any]:
    """Wrap data in llm-serving's event object."""
    return {"event": "message", "retry": 30000, "data": data}


def partial_response(token: dict[str, Any]) -> dict[str, Any]:
    """Return the event data of one token."""
    return {"details": None, "generated_text": token["text"], "tokens": token, "top_tokens": [token]}


def full_response(tokens: list[dict[str, Any]], reason: str, count: int) -> dict[str, Any]:
    """Return the complete response."""
    return {
        "generated_text": "".join(token["text"] for token in tokens),
        "finish_reason": reason,
        "generated_tokens": count,
        "prefill": tokens[:1],
        "seed": 0,
        "tokens": tokens,
        "top_tokens": [tokens[:1]],
    }
