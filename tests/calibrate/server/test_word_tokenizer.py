"""The words of prompts and answers: what `sim serve` counts as one token, clients count as one token too."""

from __future__ import annotations

import random

import pytest
from servesim.calibrate.client.prompts import WORDS
from servesim.calibrate.server.tokenizers import WordTokenizer, decode

from ..client.vocabularies import count_llama_tokens

TOKENS = [random.Random(0).randrange(32_000) for _ in range(400)]


def encode(text: str, vocab: int) -> list[int]:
    return WordTokenizer(vocab).encode(text)


def test_one_word_is_one_token_and_numbers_name_tokens() -> None:
    assert encode("w17 w0 hello", 1000) == [17, 1, encode("hello", 1000)[0]]
    assert all(1 <= token < 1000 for token in encode("a b c w999999 W3", 1000))


@pytest.mark.parametrize("vocab", [2, 1000, 32_000])
def test_the_text_of_an_answer_has_as_many_tokens_as_the_answer(vocab: int) -> None:
    tokens = encode(decode(TOKENS), vocab)
    assert len(tokens) == len(TOKENS)
    assert all(1 <= token < vocab for token in tokens)


def test_an_answer_that_comes_back_in_a_prompt_keeps_its_text() -> None:
    assert decode(encode(decode(TOKENS), 32_000)) == decode(TOKENS)
    assert encode(decode([121]), 1000) == [121]


def test_the_words_differ() -> None:
    assert len(set(WORDS)) == len(WORDS) == 256
    assert all(word.isalpha() and word.islower() for word in WORDS)


def test_clients_with_the_vocabulary_of_llama_count_the_same_tokens() -> None:
    chat = decode(TOKENS)[1:]
    assert count_llama_tokens([chat, *WORDS]) == [1 + len(TOKENS)] + [2] * len(WORDS)  # BOS
