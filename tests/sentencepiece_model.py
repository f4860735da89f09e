"""A SentencePiece model of a given vocabulary, written without a trainer: each version of it trains another one."""

from __future__ import annotations

import struct
from collections.abc import Iterable

MODEL_TYPES = {"unigram": 1, "bpe": 2}  # of trainer_spec.model_type
NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # types of a piece
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes it in place of a space, and before a text


def sentencepiece_model(words: Iterable[str], kind: str) -> bytes:
    """Return the bytes of a tokenizer.model in which each word is one token, and other words are several.

    BPE joins two pieces to a third one, so all beginnings of a word are pieces too. Better scores are for longer ones.
    """
    letters = dict.fromkeys(f"{SPACE}abcdefghijklmnopqrstuvwxyz0123456789", -100.0)
    starts = {f"{SPACE}{word[:end]}": float(end) - 50 for word in words for end in range(1, len(word) + 1)}
    pieces = [piece("<unk>", 0.0, UNKNOWN), piece("<s>", 0.0, CONTROL), piece("</s>", 0.0, CONTROL)]
    pieces += [piece(text, score, NORMAL) for text, score in {**letters, **starts}.items()]
    return b"".join(field(1, one) for one in pieces) + field(2, number(3, MODEL_TYPES[kind])) + field(3, b"")


def piece(text: str, score: float, kind: int) -> bytes:
    """Return a message SentencePiece: text, score, type."""
    return field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind)


def field(tag: int, content: bytes) -> bytes:
    """Return a field of a protobuf message whose content has a length."""
    return varint(tag << 3 | 2) + varint(len(content)) + content


def number(tag: int, value: int) -> bytes:
    """Return a field of a protobuf message with a whole number."""
    return varint(tag << 3) + varint(value)


def varint(value: int) -> bytes:
    """Return a whole number in base 128, its smallest digit first."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
