"""Named streams of chance: the same seed gives each name its own, so that changing one does not shift another."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator that belongs to this seed and this name."""
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(zlib.crc32(name.encode()),)))
