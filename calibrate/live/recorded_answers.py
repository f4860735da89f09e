"""The token check of a live run: keep its answers, run some of the requests again, alone with batch 1, and compare.

The sample holds requests of all prompt lengths, and some that were preempted, swapped or chunked, or that found
cached blocks. Which ones those are is known only during the run, so the tokens of all requests are kept. Logits are
large: only watched requests have some.

The single run gets the recorded token as the next input, also where it would have generated another one. So both runs
compute every token from the same tokens before it, and all differences of an answer are seen, not only the first.
An answer without a difference is exactly the answer that the request generates alone.
It runs in the worker: Python 3.9, standard library and numpy.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, Callable, Optional

from servesim.calibrate.device.backend import Backend, Row
from servesim.core import Request
from servesim.engine.server import Server
from servesim.engine.step import Step

from .block_tables import BlockTables
from .token_history import PromptMaker, TokenHistory

EVENTS = ("preempted", "swapped", "chunked", "cached")  # of a request; each can hide an error of the block tables
EVENT_SHARE = 6  # one of this many sampled requests is reserved for each event
LOGIT_BYTES = 1 << 28  # memory for the logits of a run
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # distance from 1 to the next number
LAYER_RESULTS = 10  # two norms; queries, keys and values; attention and its output; gate, up and down of the MLP
REPORT_INTERVAL_S = 0.5


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
        make_prompt: PromptMaker,
        backend: Backend,
        requests: Sequence[Request],
        count: int,  # requests to check
        vocab: int,
        seed: int = 0,
    ) -> None:
        super().__init__(make_prompt)
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

    def rows(self, server: Server, step: Step, blocks: BlockTables) -> list[Row]:
        for request, mode, _ in step.preempted:
            self._add_event(request, "swapped" if mode == "swap" else "preempted")
        for chunk in step.chunks:
            if chunk.cached:
                self._add_event(chunk.request, "cached")
            if chunk.request.cached + chunk.tokens < chunk.request.prompt:
                self._add_event(chunk.request, "chunked")
        return super().rows(server, step, blocks)

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
        watched, later = [], Counter[Request]()
        for row in range(len(self.row_requests) - 1, -1, -1):  # with drafts, a request may have several
            request = self.row_requests[row]
            if request is not None and request in self.logits:
                later[request] += 1
                index = len(self.tokens[request]) - request.prompt - later[request]
                # The tokens whose logits are kept are spread over the answer.
                if index % -(-min(request.output, request.limit) // self._logits_each) == 0:
                    watched.append((row, request, index))
        if watched:
            logits = self.backend.logits([row for row, _, _ in watched])
            for (_, request, index), row_logits in zip(watched, () if logits is None else logits):
                self.logits[request][index] = row_logits

    def keep(self, request: Request, tokens: array[int]) -> None:
        self.answers[request] = tokens

    def sample(self) -> list[Request]:
        """Return the requests to check after the run: those with an event first, then the rest of the sample."""
        finished = dict.fromkeys(request for request in self.answers if request.outcome == "finished")
        wanted = dict.fromkeys((*self.with_event, *self.first_sample))
        chosen = [request for request in wanted if request in finished][: self.count]
        for request in chosen:
            del finished[request]
        return chosen + spread_sample(list(finished), self.count - len(chosen), self.seed)


def near_tie_bound(model: dict[str, Any], dtype: str) -> float:
    """Return the largest gap of two logits that rounding can close, in standard deviations of the logits.

    Every layer rounds its results to the dtype (a uniform error of up to half an epsilon) and adds products in float32
    (an error that grows with the root of their number). The errors of all results and of the last product are
    independent. The bound is five standard deviations of the error of a difference of two logits: a run compares
    thousands of tokens, and each has many others that could replace it.
    """
    roundings = LAYER_RESULTS * model["layers"] + 1
    rounding = EPSILON.get(dtype, EPSILON["float32"]) / 2 + EPSILON["float32"] / 2 * math.sqrt(model["hidden"])
    return 5 * math.sqrt(2) * math.sqrt(roundings / 3) * rounding


class SingleRun:
    """Runs recorded requests alone on a backend, in the same few blocks."""

    def __init__(self, backend: Backend) -> None:
        about = backend.describe()
        self.backend = backend
        self.block_size: int = about["block_size"]
        self.bound = near_tie_bound(about["model"], about["dtype"])  # in standard deviations of the logits

    def check(self, prompt: int, tokens: Sequence[int], recorded: dict[int, Any]) -> dict[str, Any]:
        """Compare an answer, the tokens after the prompt; `recorded` holds logits by index of the output token."""
        table = array("i", range(1, -(-len(tokens) // self.block_size) + 1))  # block 0 is for padding rows
        differences: list[dict[str, Any]] = []
        logits = LogitDifferences(self.bound)
        for index, position in enumerate(range(prompt, len(tokens))):
            start = 0 if index == 0 else position - 1
            (token,) = self.backend.step([Row(tokens[start:position], start, table)])
            recorded_logits = recorded.get(index)
            if token == tokens[position] and recorded_logits is None:
                continue
            alone = self.backend.logits([0])
            alone = None if alone is None else alone[0]
            if token != tokens[position]:
                differences.append(self._difference(index, tokens[position], token, alone))
            if recorded_logits is not None:
                logits.add(recorded_logits, alone)
        beyond = [difference for difference in differences if not difference["near_tie"]]
        return {
            "different": len(differences),
            "beyond_ties": len(beyond),
            "first": differences[0] if differences else None,
            "first_beyond_ties": beyond[0] if beyond else None,
            "gap_to_bound": max((d["gap"] / d["bound"] for d in differences if d["gap"] and d["bound"]), default=None),
            "logits": logits.as_dict(),
        }

    def _difference(self, index: int, live: int, alone: int, logits: Any) -> dict[str, Any]:
        """Describe a difference. The gap is that of the two tokens in the logits of the single run."""
        gap = bound = None
        if logits is not None:
            gap, bound = finite(logits[alone] - logits[live]), finite(self.bound * logits.std())
        near_tie = None if logits is None else gap is not None and bound is not None and gap <= bound
        return {"index": index, "live": live, "alone": alone, "gap": gap, "bound": bound, "near_tie": near_tie}


class LogitDifferences:
    """Differences between the logits of the live run and of the single run."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.compared = 0
        self.not_finite = 0
        self.near_ties = 0  # rows of the single run whose two largest logits are closer than the bound
        self.largest: Optional[float] = None
        self.relative: Optional[float] = None  # the largest one, in standard deviations of the logits of its row

    def add(self, live: Any, alone: Any) -> None:
        """Compare the logits of one token."""
        import numpy as np

        self.compared += 1
        difference, spread = finite(abs(live - alone).max()), float(alone.std())
        if difference is None:
            self.not_finite += 1
            return
        second, first = np.partition(alone, -2)[-2:].tolist()
        self.near_ties += bool(first - second <= self.bound * spread)
        self.largest = difference if self.largest is None else max(self.largest, difference)
        relative = difference / spread if spread else 0.0
        self.relative = relative if self.relative is None else max(self.relative, relative)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts and the largest differences as JSON."""
        return {name: value for name, value in vars(self).items() if name != "bound"}


def finite(value: Any) -> Optional[float]:
    """Return a number for JSON; None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None


def check_answers(
    backend: Backend, record: AnswerRecord, emit: Callable[[Any], None], should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Run the sample of a finished run again, one request at a time; return the comparison as JSON."""
    sample: list[Request] = record.sample()
    single = SingleRun(backend)
    answers: list[dict[str, Any]] = []
    start = reported = time.monotonic()
    for request in sample:
        if time.monotonic() - reported >= REPORT_INTERVAL_S:
            reported = time.monotonic()
            emit({"t": reported - start, "checked": len(answers), "to_check": len(sample)})
            if should_stop():
                break
        tokens = record.answers[request]
        checked = single.check(request.prompt, tokens, record.logits.get(request, {}))
        events, length = record.events.get(request, []), len(tokens) - request.prompt
        answers.append({"id": request.id, "prompt": request.prompt, "tokens": length, "events": events, **checked})
    return {
        "asked": record.count,
        "finished": sum(request.outcome == "finished" for request in record.answers),
        "stopped": len(answers) < len(sample),
        "seconds": time.monotonic() - start,
        "dtype": backend.describe()["dtype"],
        "bound": single.bound,
        "answers": answers,
    }
