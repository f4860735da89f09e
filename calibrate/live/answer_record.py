"""Keep the answers of a live run for the token check: their tokens, and the logits of some of them.

The sample holds requests of all prompt lengths, and some that were preempted, swapped or chunked. Which ones those are
is known only during the run, so the tokens of all requests are kept. Logits are large: only watched requests have some.
It runs in the worker: Python 3.9, standard library and numpy.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

from servesim.calibrate.device.backend import Backend, Row
from servesim.core import Request
from servesim.engine.server import Server
from servesim.engine.step import Step

from .block_tables import BlockTables
from .prompts import PromptMaker, TokenHistory

EVENTS = ("preempted", "swapped", "chunked")  # of a request; each can hide an error of the block tables
EVENT_SHARE = 6  # one of this many sampled requests is reserved for each event
LOGIT_BYTES = 1 << 28  # memory for the logits of a run


def spread_sample(requests: Sequence[Request], count: int, seed: int) -> list[Request]:
    """Draw requests spread over the prompt lengths, in random order: one from each of `count` equal groups."""
    rng = random.Random(seed)
    ordered = sorted(requests, key=lambda request: (request.prompt, str(request.id)))
    count = min(count, len(ordered))
    limits = [len(ordered) * index // count for index in range(count + 1)] if count else [0]
    sample = [ordered[rng.randrange(low, high)] for low, high in zip(limits, limits[1:])]
    rng.shuffle(sample)
    return sample


class AnswerRecord(TokenHistory):
    """The token history of a run that also keeps finished answers, and logits of the watched requests."""

    def __init__(
        self,
        tables: BlockTables,
        make_prompt: PromptMaker,
        backend: Backend,
        requests: Sequence[Request],
        count: int,  # requests to check
        vocab: int,
        seed: int = 0,
    ) -> None:
        super().__init__(tables, make_prompt)
        self.backend = backend
        self.count = min(count, len(requests))
        self.seed = seed
        self.answers: dict[Request, array[int]] = {}  # of finished requests: prompt and output
        self.events: dict[Request, list[str]] = {}
        self.logits: dict[Request, dict[int, Any]] = {}  # of watched requests, by index of the output token
        self.with_event: dict[Request, None] = {}  # reserved places of the sample; a dict keeps the order
        self.first_sample = spread_sample(requests, self.count, seed)
        self._places = dict.fromkeys(EVENTS, max(1, self.count // EVENT_SHARE))
        watched = len(self.first_sample) + sum(self._places.values())
        self._logits_each = max(1, LOGIT_BYTES // (4 * vocab * watched))  # per watched request
        for request in self.first_sample:
            self.logits[request] = {}

    def rows(self, server: Server, step: Step) -> list[Row]:
        for request, mode, _ in step.preempted:
            self._add_event(request, "swapped" if mode == "swap" else "preempted")
        for chunk in step.chunks:
            if chunk.tokens < chunk.request.prompt:
                self._add_event(chunk.request, "chunked")
        return super().rows(server, step)

    def _add_event(self, request: Request, event: str) -> None:
        events = self.events.setdefault(request, [])
        if event in events:
            return
        events.append(event)
        if self._places[event] and request not in self.with_event:
            self._places[event] -= 1
            self.with_event[request] = None
            self.logits.setdefault(request, {})

    def append(self, tokens: Sequence[int]) -> None:
        super().append(tokens)
        watched = [
            (row, request, index)
            for row, request in enumerate(self.row_requests)
            if request is not None and request in self.logits
            for index in [len(self.tokens[request]) - request.prompt - 1]
            if index % self._stride(request) == 0
        ]
        if watched:
            logits = self.backend.logits([row for row, _, _ in watched])
            for (_, request, index), row_logits in zip(watched, () if logits is None else logits):
                self.logits[request][index] = row_logits

    def _stride(self, request: Request) -> int:
        """Return the distance of output tokens whose logits are kept: spread over the answer."""
        return -(-min(request.output, request.limit) // self._logits_each)

    def drop(self, requests: Sequence[Request]) -> None:
        for request in requests:
            tokens = self.tokens.pop(request, None)
            if tokens is not None:
                self.answers[request] = tokens

    def sample(self) -> list[Request]:
        """Return the requests to check after the run: those with an event first, then the rest of the sample."""
        finished = dict.fromkeys(request for request in self.answers if request.outcome == "finished")
        wanted = dict.fromkeys((*self.with_event, *self.first_sample))
        chosen = [request for request in wanted if request in finished][: self.count]
        for request in chosen:
            del finished[request]
        return chosen + spread_sample(list(finished), self.count - len(chosen), self.seed)
