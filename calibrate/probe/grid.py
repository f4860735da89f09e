"""The designed grid: which steps to measure so that every term of a cost model is seen, corners and middle alike.

Python 3.9, standard library: it is used next to the device.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

TOKENS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
GEARS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
CONTEXTS = (16, 128, 512, 1024, 2048)
BUSY = (1, 8, 32)
SPREAD = 0.7  # of the rows that servers see


class Point(NamedTuple):
    """A step to measure: prompt parts, decoding rows, or blocks to copy."""

    kind: str  # prefill | decode | mixed | swap | busy: a decode while the host's front end is at work
    rows: int = 0  # prompts
    tokens: int = 0  # of each prompt
    cached: int = 0  # before each prompt's part
    decoding: int = 0  # rows that decode
    context: int = 0  # cached tokens of each of them
    blocks: int = 0  # copied out, or in
    spread: float = 0.0  # how unlike its rows are: the standard deviation of the logarithm of their lengths


def grid(most_rows: int, most_tokens: int, longest: int, host_blocks: int = 0, gears: Sequence[int] = GEARS,
         seed: int = 0) -> list[Point]:  # fmt: skip
    """Return the points: designed ones, then others drawn between them, where a fit can be tried it was not led to.

    `most_tokens` bounds the prompt tokens of a step, `longest` a sequence.
    """
    points = prefills(most_rows, most_tokens, longest) + decodes(most_rows, longest, gears)
    points += mixtures(most_rows, most_tokens, longest)
    points += [Point("swap", blocks=count) for count in (1, 4, 16, 64, 256) if count <= host_blocks]
    points += drawn(len(points) // 2, most_rows, most_tokens, longest, seed)
    points += [Point("busy", decoding=rows, context=128) for rows in BUSY if rows <= most_rows and longest > 128]
    return list(dict.fromkeys(points))


def prefills(most_rows: int, most_tokens: int, longest: int) -> list[Point]:
    """Return whole prompts, alone and in batches, and parts of prompts behind cached ones."""
    totals = [total for total in TOKENS if total <= most_tokens]
    points = []
    for rows in (1, 2, 4, 8):
        fitting = [total // rows for total in totals if total >= 8 * rows or rows == 1]
        points += [Point("prefill", rows, tokens) for tokens in fitting if tokens <= longest and rows <= most_rows]
    behind = [(tokens, cached) for tokens in (64, 256, 512) for cached in (128, 512, 1536)]
    points += [Point("prefill", 1, t, c) for t, c in behind if t + c <= longest and t <= most_tokens]
    return points


def decodes(most_rows: int, longest: int, gears: Sequence[int]) -> list[Point]:
    """Return decodes at every gear over all contexts, and with fewer live rows than the gear has."""
    points = []
    for gear in (gear for gear in gears if gear <= most_rows):
        points += [Point("decode", decoding=gear, context=c) for c in CONTEXTS if c < longest]
        if gear > 4:
            points += [Point("decode", decoding=gear - gear // 6, context=c) for c in (128, 512) if c < longest]
    return points


def mixtures(most_rows: int, most_tokens: int, longest: int) -> list[Point]:
    """Return steps that run parts of prompts and decodes together, as chunked schedulers do."""
    parts = [(1, tokens, cached) for tokens in (32, 128, 192, 256, 400, 512) for cached in (0, 512, 1280)]
    parts += [(4, 32, 0), (3, 64, 0), (2, 128, 256), (2, 448, 0)]
    return [
        Point("mixed", rows, tokens, cached, decoding, context)
        for rows, tokens, cached in parts
        for decoding, context in ((4, 128), (32, 128), (48, 600), (96, 128), (96, 512), (most_rows - 8, 96))
        if 0 < decoding <= most_rows - rows and rows * tokens <= most_tokens and max(tokens + cached, context) < longest
    ]


def drawn(count: int, most_rows: int, most_tokens: int, longest: int, seed: int) -> list[Point]:
    """Return points at random places, evenly over the orders of magnitude."""
    chance = random.Random(f"probe grid {seed}")

    def about(low: int, high: int) -> int:
        return int(max(low, min(high, round(low * (high / low) ** chance.random()))))

    points = []
    for number in range(count):
        kind = chance.choice(("prefill", "decode", "decode", "mixed"))
        rows = about(1, min(8, most_rows)) if kind != "decode" else 0
        tokens = about(2, max(2, min(longest - 1, most_tokens // rows))) if rows else 0
        decoding = about(1, max(1, most_rows - rows)) if kind != "prefill" else 0
        context = about(16, min(longest - 1, 2048)) if decoding else 0
        spread = SPREAD if number % 3 and rows + decoding > 1 else 0.0
        points.append(Point(kind, rows, tokens, 0, decoding, context, 0, spread))
    return points


def lengths(point: Point, longest: int, chance: random.Random) -> list[tuple[int, int]]:
    """Return (tokens, cached) of a point's rows, prompts first."""
    prompts = [max(min(2, point.tokens), part) for part in unlike(point.rows, point.tokens, point.spread, chance)]
    contexts = unlike(point.decoding, point.context, point.spread, chance)
    found = [(min(tokens, longest - point.cached), point.cached) for tokens in prompts]
    return found + [(1, min(context, longest - 1)) for context in contexts]


def unlike(count: int, mean: int, spread: float, chance: random.Random) -> list[int]:
    """Return lengths with about this mean, as unlike as asked."""
    if not spread:
        return [mean] * count
    drawn = [chance.lognormvariate(0.0, spread) for _ in range(count)]
    return [max(1, round(mean * count * part / sum(drawn))) for part in drawn]
