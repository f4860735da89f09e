"""Check a backend: run scripted requests in scattered KV blocks and compare their scores with a pass without a cache.

The comparison shows whether the cache, the block tables and the swaps are right on this device. Lengths are tokens.
Runs next to the device: standard library and numpy, Python 3.9.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import numpy as np

from .backend import Row

PROMPTS = (1, 7, 16, 17, 40, 64, 70, 130)  # around a block, around a tile, and several of both
ANSWER = 8  # tokens that each request generates


@dataclass(eq=False)
class ScriptedRequest:
    """One request: its tokens, how many of them are cached and where, and what the steps found."""

    tokens: list[int]
    prompt: int
    cached: int = 0
    table: array[int] = field(default_factory=lambda: array("i"))  # device blocks
    host_table: list[int] = field(default_factory=list)  # host blocks, while swapped out
    found: dict[int, tuple[int, Any]] = field(default_factory=dict)  # next token and scores after each position

    @property
    def pending(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.cached


@dataclass
class Comparison:
    """Differences between scores and those of the pass without a cache. A NaN stays."""

    errors: list[float] = field(default_factory=list)  # of each row: |scores - reference| / |reference|
    distance: float = 0.0  # largest difference of a score
    relative: float = 0.0  # the same, relative to the largest reference score of the request
    missed: int = 0  # rows whose most likely token is not that of the reference
    lost: float = 0.0  # largest score lost by that, relative to the standard deviation of the reference

    def add(self, token: int, scores: Any, reference: Any, scale: float) -> None:
        """Compare one row."""
        difference, best = float(np.abs(scores - reference).max()), int(reference.argmax())
        self.errors.append(float(np.linalg.norm(scores - reference) / np.linalg.norm(reference)))
        self.distance = float(np.maximum(self.distance, difference))
        self.relative = float(np.maximum(self.relative, difference / scale))
        self.missed += token != best
        self.lost = max(self.lost, float((reference[best] - reference[token]) / reference.std()))


class PagedRun:
    """Requests on a loaded backend, with block tables as an engine keeps them.

    `poison` writes NaN into freed blocks, so that a later read of them shows. It needs a torch backend.
    """

    def __init__(self, backend: Any, seed: int, poison: bool = False) -> None:
        about = backend.describe()
        self.backend, self.poison = backend, poison
        self.block_size, self.vocab = about["block_size"], about["model"]["vocab"]
        self.rng, self.prompt_rng = random.Random(seed), random.Random(seed)
        self.free = list(range(about["blocks"]))
        self.free_host = list(range(about["host_blocks"]))
        self.rng.shuffle(self.free)
        self.rng.shuffle(self.free_host)
        self.requests: list[ScriptedRequest] = []
        self.rows = 0  # computed so far

    def begin(self, length: int) -> ScriptedRequest:
        """Add a request with a random prompt."""
        request = ScriptedRequest([self.prompt_rng.randrange(self.vocab) for _ in range(length)], length)
        self.requests.append(request)
        return request

    def step(self, chunks: Mapping[ScriptedRequest, int], wrong: Optional[ScriptedRequest] = None) -> list[int]:
        """Compute that number of pending tokens of each request, and append the next token where none is left.

        The first two blocks of `wrong` are exchanged in this step.
        """
        rows = [self._row(request, tokens, request is wrong) for request, tokens in chunks.items()]
        found: list[int] = self.backend.step(rows)
        for request, row, token, scores in zip(chunks, rows, found, self.backend.logits()):
            request.cached += len(row.tokens)
            request.found[request.cached - 1] = token, scores
            if not request.pending:
                request.tokens.append(token)
        self.rows += len(rows)
        return found

    def decode(self, *requests: ScriptedRequest) -> list[int]:
        """Generate one more token of each."""
        return self.step(dict.fromkeys(requests, 1))

    def swap_out(self, request: ScriptedRequest) -> None:
        """Move the blocks of a request to the host."""
        request.host_table = [self.free_host.pop() for _ in request.table]
        self.backend.swap_out(list(zip(request.table, request.host_table)))
        self.finish(request)

    def swap_in(self, request: ScriptedRequest) -> None:
        """Move the blocks of a request back, into other device blocks."""
        request.table = array("i", [self.free.pop() for _ in request.host_table])
        self.backend.swap_in(list(zip(request.host_table, request.table)))
        self.free_host += request.host_table
        request.host_table = []

    def finish(self, request: ScriptedRequest) -> None:
        """Free the device blocks of a request."""
        if self.poison:
            self.backend.loaded.cache[list(request.table)] = math.nan
        self.free += request.table
        self.rng.shuffle(self.free)
        request.table = array("i")

    def compare(self, chunks: bool = True) -> Comparison:
        """Compare all scores with those of a pass without a cache; without `chunks`, only those of generated tokens."""
        seen = Comparison()
        for request in (one for one in self.requests if one.found):
            reference = self.backend.plain(request.tokens[: request.cached])
            scale = float(np.abs(reference).max())
            for position, (token, scores) in request.found.items():
                if chunks or position >= request.prompt - 1:
                    seen.add(token, scores, reference[position], scale)
        return seen

    def _row(self, request: ScriptedRequest, tokens: int, wrong: bool) -> Row:
        end = request.cached + tokens
        while len(request.table) * self.block_size < end:
            request.table.append(self.free.pop())
        table = array("i", request.table)
        if wrong:
            table[0], table[1] = table[1], table[0]
        return Row(request.tokens[request.cached : end], request.cached, table)


class SelfTest:
    """Drives a run at random: requests come, are computed in chunks, swapped out and in, and finish, in any order."""

    def __init__(self, run: PagedRun, answer: int, spoil: bool = False) -> None:
        self.paged, self.rng, self.answer, self.spoil = run, run.rng, answer, spoil
        self.running: list[ScriptedRequest] = []
        self.swapped: list[ScriptedRequest] = []
        self.counts = {"steps": 0, "chunks": 0, "swaps": 0, "spoiled": 0, "largest": 0, "smallest": 1 << 30}

    def run(self, lengths: Sequence[int]) -> None:
        """Serve prompts of these lengths, a few more or fewer at each step."""
        waiting = [self.paged.begin(length) for length in lengths]
        while waiting or self.running or self.swapped:
            if self.swapped and (not self.running or self.rng.random() < 0.5):
                self.running.append(self.swapped.pop(0))
                self.paged.swap_in(self.running[-1])
            elif len(self.running) > 1 and self.rng.random() < 0.3:
                self._swap_out(self.rng.choice(self.running))
            for _ in range(self.rng.choice((0, 1, 1, 2))):
                self.running += waiting[:1]
                del waiting[:1]
            if self.running:
                self._step()

    def _step(self) -> None:
        chunks = {request: self._tokens(request) for request in self.running}
        self.counts["steps"] += 1
        self.counts["largest"] = max(self.counts["largest"], len(chunks))
        self.counts["smallest"] = min(self.counts["smallest"], len(chunks))
        self.paged.step(chunks, self._wrong(chunks))
        for request in chunks:
            if len(request.tokens) == request.prompt + self.answer:
                self.running.remove(request)
                self.paged.finish(request)

    def _tokens(self, request: ScriptedRequest) -> int:
        """Choose some or all of the pending tokens."""
        tokens = self.rng.randint(1, request.pending) if self.rng.random() < 0.5 else request.pending
        self.counts["chunks"] += tokens > 1 and request.cached > 0
        return tokens

    def _wrong(self, chunks: Mapping[ScriptedRequest, int]) -> Optional[ScriptedRequest]:
        """Return the request whose table is spoiled in this step: the first decode that reads two blocks, once."""
        if not self.spoil or self.counts["spoiled"]:
            return None
        size = self.paged.block_size
        wrong = next((one for one, tokens in chunks.items() if tokens == 1 and one.cached > size), None)
        self.counts["spoiled"] += wrong is not None
        return wrong

    def _swap_out(self, request: ScriptedRequest) -> None:
        if request.table and len(request.table) <= len(self.paged.free_host):
            self.paged.swap_out(request)
            self.running.remove(request)
            self.swapped.append(request)
            self.counts["swaps"] += 1


def run(backend: Any, args: dict[str, Any], emit: Optional[Callable[[Any], None]] = None) -> dict[str, Any]:
    """Test a loaded backend; return counts, tokens that differ from the pass without a cache, and the largest error.

    The error of a score is relative to the largest score. With `spoil`, one block table is wrong once: the error must
    show it.
    """
    paged = PagedRun(backend, args.get("seed", 0))
    test = SelfTest(paged, args.get("answer", ANSWER), args.get("spoil", False))
    test.run(args.get("prompts", PROMPTS))
    seen = paged.compare(chunks=False)
    return {**test.counts, "scores": len(seen.errors), "differ": seen.missed, "error": seen.relative}
