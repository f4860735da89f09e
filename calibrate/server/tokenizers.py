"""Tokens of texts. Prompts: one word is one token, or the tokens of a tokenizer file. Answers: one word per token.

There are fewer words of answers than tokens, so several tokens have the same word.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Union

from servesim.calibrate.client.prompts import WORDS
from servesim.traces.read.tokens import read_tokenizer

NUMBERED_WORD = re.compile(r"w(\d{1,9})$")
TOKENS = {word: index or len(WORDS) for index, word in enumerate(WORDS)}  # of each word of an answer; never 0


class CannotEncode(ValueError):
    """A tokenizer has no tokens for a text."""


@dataclass(frozen=True)
class WordTokenizer:
    """The tokenizer of prompts if there is no tokenizer file: `w17` is token 17."""

    size: int  # of the vocabulary
    in_thread = False

    def encode(self, text: str) -> list[int]:
        """Return one token per word."""
        return [encode_word(word, self.size) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return decode(tokens)[1:]


class FileTokenizer:
    """A tokenizer.model or tokenizer.json of a real model: clients count the same tokens. It adds no special tokens."""

    in_thread = True  # 20 ms for 5,000 tokens: not in the thread that sends the tokens of all streams

    def __init__(self, path: str) -> None:
        self._tokenizer = read_tokenizer(path)
        self.size = self._tokenizer.size

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode_unlocked(text)
        except Exception as error:  # the library raises Exception itself, e.g. for a word without a token
            reason = " ".join(str(error).split())[:200]
            raise CannotEncode(f"the tokenizer of this server cannot encode the text: {reason}") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)


Tokenizer = Union[WordTokenizer, FileTokenizer]


def encode_word(word: str, vocab: int) -> int:
    """Return the token of a word; never 0."""
    match = NUMBERED_WORD.match(word)
    known = int(match[1]) if match else TOKENS.get(word)
    if known is not None and known < vocab:
        return max(1, known)
    return (zlib.crc32(word.encode()) if known is None else known) % (vocab - 1) + 1


def decode(tokens: Iterable[int]) -> str:
    """Return the text of the tokens of an answer, with a leading space."""
    return "".join(" " + WORDS[token % len(WORDS)] for token in tokens)
