"""Samples of known costs, for tests of the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from servesim.calibrate.probe.sample_set import Samples
from servesim.core import Shape

LENGTHS = [int(x) for x in np.geomspace(16, 2048, 15)]


def prompts(*tokens: int, cached: int = 0) -> Shape:
    """Return a prefill step with these chunks, each after `cached` tokens."""
    total = sum(tokens)
    return Shape(len(tokens), total, total, sum(n * n for n in tokens), total * cached)


def decodes(rows: int, context: int) -> Shape:
    """Return a decode step with this context per row."""
    return Shape(decode_rows=rows, decode_live=rows, context=rows * context)


def both(prefill: Shape, decode: Shape) -> Shape:
    """Return a mixed step."""
    return Shape(*(a + b for a, b in zip(prefill, decode, strict=True)))


DECODES = [decodes(rows, context) for rows in (1, 2, 4, 8, 16, 32) for context in (16, 128, 512, 1024)]


def measured(
    shapes: Iterable[Shape], seconds: Callable[[Shape], float], scatter: float = 0.0, repeats: int = 1, seed: int = 0
) -> Samples:
    """Return samples with lognormal scatter; the mean of a sample is the true time."""
    steps = [shape for shape in shapes for _ in range(repeats)]
    noise = np.exp(np.random.default_rng(seed).normal(-(scatter**2) / 2, scatter, len(steps)))
    times = np.array([seconds(shape) for shape in steps]) * noise
    return Samples.from_shapes(steps, times, np.arange(len(steps)) // repeats)
