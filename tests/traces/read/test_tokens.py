"""Token counts: by estimate, by a function, by a tokenizer file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from servesim.core import BadInput
from servesim.traces.read.tokens import token_counter

from ...sentencepiece_model import sentencepiece_model


def test_without_a_tokenizer_four_characters_are_a_token() -> None:
    count = token_counter(None)
    assert [count(text) for text in ("", "a", "four", "fives")] == [0, 1, 1, 2]


def test_a_function_is_used_unchanged() -> None:
    assert token_counter(len)("five!") == 5


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in (("tokenizer.model", "sentencepiece"), ("tokenizer.json", "tokenizers")):
        monkeypatch.setitem(sys.modules, package, None)  # importing it now fails
        path = tmp_path / name
        path.touch()
        with pytest.raises(BadInput, match=f"tokenizer: {path} needs {package}, the extra `tokenizers`: run pip"):
            token_counter(path)
        path.unlink()


def test_in_a_folder_the_sentencepiece_model_is_preferred(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(["aa", "bb"], "bpe"))
    (tmp_path / "tokenizer.json").touch()
    count = token_counter(tmp_path)
    assert [count(text) for text in ("", "aa bb aa", "ab")] == [0, 3, 2]


def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    path = tmp_path / "tokenizer.model"
    path.write_text("not a model")
    with pytest.raises(BadInput, match=f"tokenizer: expected a SentencePiece model, got {path}"):
        token_counter(path)


def test_a_real_tokenizer_json_counts_without_special_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"hello": 0, "there": 1, "<s>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_counter(tmp_path / "tokenizer.json")("hello there hello") == 3


def test_a_path_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"tokenizer: expected a tokenizer\.model or tokenizer\.json, or a folder with one"
    ):
        token_counter(tmp_path)
