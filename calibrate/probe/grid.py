"""The probe grid: the steps to measure, chosen so that the samples determine every term of a cost model.

It runs in the worker: Python 3.9, standard library.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from servesim.calibrate.device.backend import ROW_BUCKETS

PREFILL_TOKENS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
CONTEXTS = (16, 128, 512, 1024, 2048)
LENGTH_SPREAD = 0.7  # Point.spread of typical server workloads


class Point(NamedTuple):
    """A step to measure: prompt chunks, decode rows, or blocks to copy."""

    kind: str  # prefill | decode | mixed | swap
    rows: int = 0  # prompt chunks
    tokens: int = 0  # per chunk
    cached: int = 0  # tokens before each chunk
    decoding: int = 0  # decode rows
    context: int = 0  # cached tokens per decode row
    blocks: int = 0  # copied in one direction
    spread: float = 0.0  # standard deviation of the logarithm of the row lengths


def grid(
    max_rows: int,
    max_tokens: int,
    max_seq_len: int,
    host_blocks: int = 0,
    row_buckets: Sequence[int] = ROW_BUCKETS,
    seed: int = 0,
) -> list[Point]:
    """Return the points: designed ones, then random ones between them, which test the fit.

    `max_tokens` limits the prompt tokens of a step, `max_seq_len` the length of a sequence.
    """
    points = prefills(max_rows, max_tokens, max_seq_len) + decodes(max_rows, max_seq_len, row_buckets)
    points += mixed_steps(max_rows, max_tokens, max_seq_len)
    points += [Point("swap", blocks=count) for count in (1, 4, 16, 64, 256) if count <= host_blocks]
    points += random_points(len(points) // 2, max_rows, max_tokens, max_seq_len, seed)
    return list(dict.fromkeys(points))


def prefills(max_rows: int, max_tokens: int, max_seq_len: int) -> list[Point]:
    """Return whole prompts, single and in batches, and chunks that follow cached tokens."""
    totals = [total for total in PREFILL_TOKENS if total <= max_tokens]
    points = []
    for rows in (1, 2, 4, 8):
        fitting = [total // rows for total in totals if total >= 8 * rows or rows == 1]
        points += [Point("prefill", rows, tokens) for tokens in fitting if tokens <= max_seq_len and rows <= max_rows]
    chunks = [(tokens, cached) for tokens in (64, 256, 512) for cached in (128, 512, 1536)]
    points += [Point("prefill", 1, t, c) for t, c in chunks if t + c <= max_seq_len and t <= max_tokens]
    return points


def decodes(max_rows: int, max_seq_len: int, row_buckets: Sequence[int]) -> list[Point]:
    """Return decodes with full padding buckets over all contexts, and with partly filled buckets."""
    points = []
    for bucket in (bucket for bucket in row_buckets if bucket <= max_rows):
        points += [Point("decode", decoding=bucket, context=c) for c in CONTEXTS if c < max_seq_len]
        if bucket > 4:
            partial = bucket - bucket // 6
            points += [Point("decode", decoding=partial, context=c) for c in (128, 512) if c < max_seq_len]
    return points


def mixed_steps(max_rows: int, max_tokens: int, max_seq_len: int) -> list[Point]:
    """Return steps with prompt chunks and decodes, as in chunked prefill."""
    chunks = [(1, tokens, cached) for tokens in (32, 128, 192, 256, 400, 512) for cached in (0, 512, 1280)]
    chunks += [(4, 32, 0), (3, 64, 0), (2, 128, 256), (2, 448, 0)]
    return [
        Point("mixed", rows, tokens, cached, decoding, context)
        for rows, tokens, cached in chunks
        for decoding, context in ((4, 128), (32, 128), (48, 600), (96, 128), (96, 512), (max_rows - 8, 96))
        if 0 < decoding <= max_rows - rows
        if rows * tokens <= max_tokens
        if max(tokens + cached, context) < max_seq_len
    ]


def random_points(count: int, max_rows: int, max_tokens: int, max_seq_len: int, seed: int) -> list[Point]:
    """Return random points with log-uniform sizes."""
    rng = random.Random(f"probe grid {seed}")

    def log_uniform(low: int, high: int) -> int:
        return int(max(low, min(high, round(low * (high / low) ** rng.random()))))

    points = []
    for number in range(count):
        kind = rng.choice(("prefill", "decode", "decode", "mixed"))
        rows = log_uniform(1, min(8, max_rows)) if kind != "decode" else 0
        tokens = log_uniform(2, max(2, min(max_seq_len - 1, max_tokens // rows))) if rows else 0
        decoding = log_uniform(1, max(1, max_rows - rows)) if kind != "prefill" else 0
        context = log_uniform(16, min(max_seq_len - 1, 2048)) if decoding else 0
        spread = LENGTH_SPREAD if number % 3 and rows + decoding > 1 else 0.0
        points.append(Point(kind, rows, tokens, 0, decoding, context, 0, spread))
    return points


def lengths(point: Point, max_seq_len: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return (tokens, cached tokens) of each row of a point, prompt chunks first."""
    prompts = [max(min(2, point.tokens), n) for n in spread_lengths(point.rows, point.tokens, point.spread, rng)]
    contexts = spread_lengths(point.decoding, point.context, point.spread, rng)
    rows = [(min(tokens, max_seq_len - point.cached), point.cached) for tokens in prompts]
    return rows + [(1, min(context, max_seq_len - 1)) for context in contexts]


def spread_lengths(count: int, mean: int, spread: float, rng: random.Random) -> list[int]:
    """Return lengths with about this mean and this standard deviation of their logarithms."""
    if not spread:
        return [mean] * count
    factors = [rng.lognormvariate(0.0, spread) for _ in range(count)]
    return [max(1, round(mean * count * factor / sum(factors))) for factor in factors]
