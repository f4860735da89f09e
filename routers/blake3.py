"""BLAKE3 of a short text (at most 1,024 bytes, one chunk), which SGLang's router uses to place keys."""

from __future__ import annotations

import struct

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)  # of the message words, from round to round
MIXED = (  # positions that one quarter round mixes: columns, then diagonals
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
ROUNDS = 7
BLOCK = 64
LONGEST = 1024
CHUNK_START, CHUNK_END, ROOT = 1, 2, 8
MASK = 0xFFFFFFFF


def rotate(value: int, bits: int) -> int:
    return (value >> bits) | (value << (32 - bits)) & MASK


def compress(chain: tuple[int, ...], block: bytes, length: int, flags: int) -> tuple[int, ...]:
    """Return the next chaining value."""
    words = list(struct.unpack("<16I", block.ljust(BLOCK, b"\0")))
    state = [*chain, *IV[:4], 0, 0, length, flags]
    for _ in range(ROUNDS):
        for step, (a, b, c, d) in enumerate(MIXED):
            for word, (first, second) in ((words[2 * step], (16, 12)), (words[2 * step + 1], (8, 7))):
                state[a] = (state[a] + state[b] + word) & MASK
                state[d] = rotate(state[d] ^ state[a], first)
                state[c] = (state[c] + state[d]) & MASK
                state[b] = rotate(state[b] ^ state[c], second)
        words = [words[place] for place in ORDER]
    return tuple(state[place] ^ state[place + 8] for place in range(8))


def blake3(text: bytes) -> bytes:
    """Return the 32 bytes of the hash."""
    if len(text) > LONGEST:
        raise ValueError(f"expected at most {LONGEST} bytes, got {len(text)}")
    blocks = [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)] or [b""]
    chain: tuple[int, ...] = IV
    for number, block in enumerate(blocks):
        flags = (CHUNK_START if number == 0 else 0) | (CHUNK_END | ROOT if number == len(blocks) - 1 else 0)
        chain = compress(chain, block, len(block), flags)
    return struct.pack("<8I", *chain)
