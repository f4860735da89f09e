"""Count the tokens of a text with a tokenizer of the user, or estimate them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Optional, Union

from servesim.core import BadInput

CountTokens = Callable[[str], int]  # text -> tokens, without begin-of-sequence
Tokenizer = Union[str, "os.PathLike[str]", CountTokens]

BOS = 1  # the server adds one begin-of-sequence token to every prompt
CHARS_PER_TOKEN = 4  # usual estimate for English text
ESTIMATE_NOTE = (
    f"token counts are estimated at {CHARS_PER_TOKEN} characters per token; pass a tokenizer for exact counts"
)


def token_counter(tokenizer: Optional[Tokenizer]) -> CountTokens:
    """Return a function that counts tokens: the given one, the tokenizer in a file or folder, or an estimate (None)."""
    if tokenizer is None:
        return estimate
    if callable(tokenizer):
        return tokenizer
    path = Path(tokenizer)
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


def _sentencepiece(path: Path) -> CountTokens:
    package = _import_package("sentencepiece", path)
    try:
        model = package.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        raise BadInput(f"tokenizer: expected a SentencePiece model, got {path}") from None
    return lambda text: len(model.encode(text))


def _tokenizers(path: Path) -> CountTokens:
    package = _import_package("tokenizers", path)
    try:
        model = package.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise BadInput(f"tokenizer: expected a tokenizer.json, got {path}: {str(error)[:80]}") from None
    return lambda text: len(model.encode(text, add_special_tokens=False))


def _import_package(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise BadInput(f"tokenizer: reading {path} needs a package: pip install {name}") from None
