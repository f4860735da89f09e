"""Tokens of a text: encoded with a tokenizer file of the user, counted with it, or estimated."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from servesim.core import BadInput
from servesim.core.errors import missing_package

CountTokens = Callable[[str], int]  # text -> tokens, without begin-of-sequence
Tokenizer = Union[str, "os.PathLike[str]", CountTokens]

BOS = 1  # the server adds one begin-of-sequence token to every prompt
CHARS_PER_TOKEN = 4  # usual estimate for English text
ESTIMATE_NOTE = (
    f"token counts are estimated at {CHARS_PER_TOKEN} characters per token; pass a tokenizer for exact counts"
)


class TextTokenizer(NamedTuple):
    """The tokenizer of a model, without special tokens such as begin-of-sequence."""

    size: int  # ids are smaller
    encode: Callable[[str], list[int]]
    encode_unlocked: Callable[[str], list[int]]  # the same; other threads run meanwhile, if the library can do this
    decode: Callable[[Sequence[int]], str]


def token_counter(tokenizer: Optional[Tokenizer]) -> CountTokens:
    """Return a function that counts tokens: the given one, the tokenizer in a file or folder, or an estimate (None)."""
    if tokenizer is None:
        return estimate
    if callable(tokenizer):
        return tokenizer
    encode = read_tokenizer(tokenizer).encode
    return lambda text: len(encode(text))


def read_tokenizer(path: Union[str, os.PathLike[str]]) -> TextTokenizer:
    """Read a tokenizer.model (SentencePiece) or tokenizer.json (Hugging Face), or the one in a folder."""
    path = Path(path)
    for name in ("tokenizer.model", "tokenizer.json") if path.is_dir() else ():
        if (path / name).exists():
            path = path / name
            break
    if not path.is_file():
        raise BadInput(f"tokenizer: expected a tokenizer.model or tokenizer.json, or a folder with one, got {path}")
    return _sentencepiece(path) if path.suffix == ".model" else _tokenizers(path)


def estimate(text: str) -> int:
    """Return the estimated tokens of a text; 0 only for an empty text."""
    return -(-len(text) // CHARS_PER_TOKEN)


def _sentencepiece(path: Path) -> TextTokenizer:
    package = _import_package("sentencepiece", path)
    try:
        model = package.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        raise BadInput(f"tokenizer: expected a SentencePiece model, got {path}") from None
    return TextTokenizer(model.vocab_size(), model.encode, model.encode, lambda ids: str(model.decode(list(ids))))


def _tokenizers(path: Path) -> TextTokenizer:
    package = _import_package("tokenizers", path)
    try:
        model = package.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise BadInput(f"tokenizer: expected a tokenizer.json, got {path}: {str(error)[:80]}") from None
    return TextTokenizer(
        max(model.get_vocab().values(), default=-1) + 1,
        lambda text: list(model.encode(text, add_special_tokens=False).ids),
        lambda text: list(model.encode_batch([text], add_special_tokens=False)[0].ids),
        lambda ids: str(model.decode(list(ids), skip_special_tokens=False)),
    )


def _import_package(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise BadInput(f"tokenizer: {path} {missing_package(name)}") from None
