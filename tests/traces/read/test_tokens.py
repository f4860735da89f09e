"""Token counts: by estimate, by a function, by a tokenizer file."""

from __future__ import annotations

from pathlib import Path

import pytest
from servesim.traces.read.tokens import token_counter

from ...sentencepiece_model import sentencepiece_model


def test_without_a_tokenizer_four_characters_are_a_token() -> None:
    count = token_counter(None)
    assert [count(text) for text in ("", "a", "four", "fives")] == [0, 1, 1, 2]


def test_a_function_is_used_unchanged() -> None:
    assert token_counter(len)("five!") == 5


def test_in_a_folder_the_sentencepiece_model_is_preferred(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(["aa", "bb"], "bpe"))
    (tmp_path / "tokenizer.json").touch()
    count = token_counter(tmp_path)
    assert [count(text) for text in ("", "aa bb aa", "ab")] == [0, 3, 2]


def test_a_real_tokenizer_json_counts_without_special_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"hello": 0, "there": 1, "<s>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_counter(tmp_path / "tokenizer.json")("hello there hello") == 3
