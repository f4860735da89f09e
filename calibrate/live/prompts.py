"""What requests say: prompts made from a seed, the tokens a model wrote, and the rows a step computes from them.

Standard library and numpy, Python 3.9: it runs next to the device.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Callable, Optional

from servesim.calibrate.device.backend import Row
from servesim.core import Request
from servesim.engine.server import Server
from servesim.engine.step import Step

from .block_tables import NOBODYS, BlockTables

Prompt = Callable[[Request], list[int]]

FILLER = 1  # the token padding rows are made of; 0 is what engines pad with, and some refuse it in a prompt


class Stories:
    """The tokens of every request that has run, prompt first."""

    def __init__(self, tables: BlockTables, prompt: Prompt) -> None:
        self.tables = tables
        self.prompt = prompt
        self.tokens: dict[Request, array[int]] = {}
        self.writers: list[Optional[Request]] = []  # by row: who writes its token, None in mid-prompt

    def rows(self, server: Server, step: Step) -> list[Row]:
        """Return a step's rows; asked between its begin and its end."""
        tables, stories = self.tables.tables, self.tokens
        rows: list[Row] = []
        writers: list[Optional[Request]] = []
        for chunk in step.chunks:
            request, part = chunk.request, chunk.tokens
            story = stories.get(request)
            if story is None:
                story = stories[request] = array("i", self.prompt(request))
            start = request._cached
            rows.append(Row(story[start : start + part], start, tables[request]))
            writers.append(request if start + part == len(story) else None)
        if step.decoders:
            members = [request for request in server.running if request._cohort is not None]
            told = [stories[request] for request in members]
            decodes = [Row(story[-1:], len(story) - 1, tables[r]) for r, story in zip(members, told)]
            rows = decodes + rows if step.plan.decode_first else rows + decodes
            writers = [*members, *writers] if step.plan.decode_first else [*writers, *members]
        if step.plan.padding:
            rows += [self._filler(step)] * step.plan.padding
        self.writers = writers
        return rows

    def _filler(self, step: Step) -> Row:
        """Return a row that nobody asked for, as long as the longest beside it."""
        longest = 1 if step.decoders else max((chunk.tokens for chunk in step.chunks), default=1)
        return Row([FILLER] * longest, 0, [NOBODYS] * -(-longest // self.tables.size))

    def write(self, tokens: Sequence[int]) -> None:
        """Add what the rows' step wrote."""
        stories = self.tokens
        for request, token in zip(self.writers, tokens):
            if request is not None:
                stories[request].append(token)

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop the stories of requests that are over."""
        for request in requests:
            self.tokens.pop(request, None)


def drawn(seed: int, vocab: int) -> Prompt:
    """Return the maker of prompts: equal seed and id give equal tokens, whoever asks."""
    import numpy as np

    def prompt(request: Request) -> list[int]:
        draw: Any = np.random.default_rng([seed, zlib.crc32(str(request.id).encode())])
        tokens: list[int] = draw.integers(FILLER, vocab, request.prompt).tolist()
        return tokens

    return prompt
