"""Tokenizer for models without a real vocabulary: one word of a prompt is one token, and `w17` is token 17.

Answers consist of common words. There are fewer of them than tokens, so several tokens have the same word.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .answer_words import ANSWER_WORDS

NUMBERED_WORD = re.compile(r"w(\d{1,9})$")
# Token of each word of an answer; it is never 0.
TOKENS = {word: place or len(ANSWER_WORDS) for place, word in enumerate(ANSWER_WORDS)}


@dataclass(frozen=True)
class WordTokenizer:
    """The tokenizer of prompts if there is no tokenizer file."""

    size: int  # of the vocabulary
    in_thread = False

    def encode(self, text: str) -> list[int]:
        return encode(text, self.size)

    def decode(self, tokens: Sequence[int]) -> str:
        return decode(tokens)[1:]


def encode(text: str, vocab: int) -> list[int]:
    """Return one token per word."""
    return [encode_word(word, vocab) for word in text.split()]


def encode_word(word: str, vocab: int) -> int:
    """Return the token of a word; never 0."""
    match = NUMBERED_WORD.match(word)
    known = int(match[1]) if match else TOKENS.get(word)
    if known is not None and known < vocab:
        return max(1, known)
    return (zlib.crc32(word.encode()) if known is None else known) % (vocab - 1) + 1


def decode_token(token: int) -> str:
    """Return the text of a token, with a leading space."""
    return " " + ANSWER_WORDS[token % len(ANSWER_WORDS)]


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens, with a leading space."""
    return "".join(map(decode_token, tokens))
