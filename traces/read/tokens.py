"""Counting tokens of text: with a tokenizer the user has, or by rule of thumb."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Optional, Union

from servesim.core import BadInput

Count = Callable[[str], int]  # tokens of a text, no begin-of-sequence counted
Tokenizer = Union[str, "os.PathLike[str]", Count]

BOS = 1  # the server puts one begin-of-sequence token before every prompt
CHARACTERS = 4  # characters a token, the usual estimate for English text
ESTIMATED = f"token counts are estimated at {CHARACTERS} characters a token: name a tokenizer for exact ones"


def counter(tokenizer: Optional[Tokenizer]) -> Count:
    """Return what counts tokens: a function as it is, the tokenizer in a file or folder, or for None an estimate."""
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
    """Return the tokens a text is likely to have; none only if it is empty."""
    return -(-len(text) // CHARACTERS)


def _sentencepiece(path: Path) -> Count:
    package = _package("sentencepiece", path)
    try:
        model = package.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        raise BadInput(f"tokenizer: expected a SentencePiece model, got {path}") from None
    return lambda text: len(model.encode(text))


def _tokenizers(path: Path) -> Count:
    package = _package("tokenizers", path)
    try:
        model = package.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise BadInput(f"tokenizer: expected a tokenizer.json, got {path}: {str(error)[:80]}") from None
    return lambda text: len(model.encode(text, add_special_tokens=False))


def _package(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise BadInput(f"tokenizer: reading {path} needs a package: pip install {name}") from None
