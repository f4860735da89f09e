"""Requests that live on a torch backend in scattered blocks, every step of theirs compared with the reference.

For the tests and for benchmarks/gpu_check.py: it keeps tables as an engine would, and poisons blocks it gives back.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from servesim.calibrate.device.backend import Row

from .backend import TorchBackend


@dataclass
class Tale:
    """One request: its tokens so far, how many of them are cached, and where."""

    tokens: list[int]
    cached: int = 0
    table: array[int] = field(default_factory=lambda: array("i"))
    away: list[int] = field(default_factory=list)  # host blocks, while swapped out


@dataclass
class Story:
    """All requests, and the worst that was seen."""

    backend: TorchBackend
    rng: random.Random
    tales: list[Tale] = field(default_factory=list)
    steps: int = 0
    errors: list[float] = field(default_factory=list)  # |out - reference| / |reference| of each row's logits
    distance: float = 0.0  # largest difference of a logit
    missed: int = 0  # rows whose most likely token is not the reference's
    lost: float = 0.0  # by how much at most, as a share of the reference's spread

    def __post_init__(self) -> None:
        self.free = list(range(self.backend.blocks))
        self.free_host = list(range(len(self.backend.host)))
        self.rng.shuffle(self.free)
        self.rng.shuffle(self.free_host)

    def begin(self, length: int) -> int:
        """Add a request with a random prompt; return its number."""
        vocab = self.backend.model.vocab
        self.tales.append(Tale([self.rng.randrange(vocab) for _ in range(length)]))
        return len(self.tales) - 1

    def step(self, chunks: Mapping[int, int]) -> list[int]:
        """Compute so many of each request's pending tokens, check, and append what a finished prompt wrote."""
        rows = [self._row(self.tales[number], tokens) for number, tokens in chunks.items()]
        found = self.backend.step(rows)
        logits = self.backend.logits()
        for number, row, token, own in zip(chunks, rows, found, logits):
            tale = self.tales[number]
            tale.cached += len(row.tokens)
            self._compare(tale, token, own)
            if tale.cached == len(tale.tokens):
                tale.tokens.append(token)
        self.steps += 1
        return found

    def decode(self, *numbers: int) -> list[int]:
        """Write one more token of each."""
        return self.step(dict.fromkeys(numbers, 1))

    def swap_out(self, number: int) -> None:
        """Move a request's blocks to the host."""
        tale = self.tales[number]
        tale.away = [self.free_host.pop() for _ in tale.table]
        self.backend.swap_out(list(zip(tale.table, tale.away)))
        self._release(tale)

    def swap_in(self, number: int) -> None:
        """Bring a request back, into other blocks."""
        tale = self.tales[number]
        self.rng.shuffle(self.free)
        tale.table = array("i", [self.free.pop() for _ in tale.away])
        self.backend.swap_in(list(zip(tale.away, tale.table)))
        self.free_host += tale.away
        tale.away = []

    def finish(self, number: int) -> None:
        """Give a request's blocks back."""
        self._release(self.tales[number])

    def _row(self, tale: Tale, tokens: int) -> Row:
        needed = -(-(tale.cached + tokens) // self.backend.block_size)
        while len(tale.table) < needed:
            tale.table.append(self.free.pop())
        return Row(tale.tokens[tale.cached : tale.cached + tokens], tale.cached, tale.table)

    def _release(self, tale: Tale) -> None:
        assert self.backend.loaded is not None
        self.backend.loaded.cache[list(tale.table)] = math.nan  # whoever reads it again will be seen
        self.free += tale.table
        tale.table = array("i")

    def _compare(self, tale: Tale, token: int, own: np.ndarray[Any, Any]) -> None:
        expected = self.backend.plain(tale.tokens[: tale.cached])[-1]
        best = int(expected.argmax())
        self.errors.append(float(np.linalg.norm(own - expected) / np.linalg.norm(expected)))
        self.distance = float(np.maximum(self.distance, np.abs(own - expected).max()))  # NaN stays
        self.missed += token != best
        self.lost = max(self.lost, float((expected[best] - expected[token]) / expected.std()))
