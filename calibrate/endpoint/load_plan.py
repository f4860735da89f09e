"""Calibration loads that reveal the step costs of a black-box server.

- single: one request; shows prefill time (with the front end's time) and the decode of one row
- batch: several requests at once; shows the decode of many rows
- burst: several prompts at once with one output token; shows prefill time without the front end's time
- busy: prompts sent to a decoding server; show the cost of mixed steps

Lengths are tokens, times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple, Optional

from servesim.core import BadInput, Request

BURST_DELAY_S = 0.001  # the first prompt of a burst is sent earlier, so that the others find a busy server
PROBES_PER_LOAD = 4  # prompts sent to a busy server, one after the other


class ServerSpeed(NamedTuple):
    """Estimated speed of the server in seconds, used to choose send times."""

    ttft: float = 0.5
    step: float = 0.05


@dataclass(frozen=True)
class Point:
    """One calibration load: `rows` requests of one prompt length."""

    kind: str  # single | batch | burst | busy
    rows: int
    prompt: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}x{self.prompt}"

    def requests(self, name: str, output: int, short_prompt: int, speed: ServerSpeed) -> list[Request]:
        """Return its requests. A new name gives new prompts."""
        if self.kind == "busy":
            return self._busy(name, output, short_prompt, speed)
        tokens, delay = (1, BURST_DELAY_S) if self.kind == "burst" else (output, 0.0)
        return [Request(f"{name}/{row}", delay if row else 0.0, self.prompt, tokens) for row in range(self.rows)]

    def _busy(self, name: str, output: int, short_prompt: int, speed: ServerSpeed) -> list[Request]:
        """Return requests that keep the server busy, and probes, one by one, at different phases of a step."""
        probes = [f"{name}/probe {k}" for k in range(PROBES_PER_LOAD)]
        background = [Request(f"{name}/{row}", 0.0, short_prompt, 2 * output) for row in range(self.rows)]
        start = 1.2 * self.rows * speed.ttft + 2.0 * speed.step
        previous = [None, *probes]
        return background + [
            Request(id, start, self.prompt, 1, follows=previous[k], think_time=(1.1 + 0.3 * k) * speed.step)
            for k, id in enumerate(probes)
        ]


@dataclass(frozen=True)
class Design:
    """The calibration loads and their number of repeats."""

    lengths: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024, 2048)  # prompt lengths of single requests
    batches: Sequence[int] = (2, 4, 8, 16, 32)  # rows of steady batches
    bursts: Sequence[int] = (2, 4, 8)  # prompts per burst
    output: int = 32  # output tokens of requests that measure decodes
    rounds: int = 3  # repeats of every load
    max_batch_tokens: int = 8192  # in the KV cache at once
    max_burst_tokens: int = 2048  # low enough that a server with chunked prefill does not split it

    def __post_init__(self) -> None:
        for name, minimum in (("lengths", 1), ("batches", 1), ("bursts", 2)):
            numbers = getattr(self, name)
            if any(number < minimum for number in numbers):
                raise BadInput(f"--{name}: expected numbers of at least {minimum}, got {min(numbers)}")
            object.__setattr__(self, name, tuple(sorted(set(numbers))))
        if not self.lengths:
            raise BadInput("--lengths: expected at least one number, got none")
        bounds = {
            "output-tokens": (self.output, 8), "rounds": (self.rounds, 1), "max-tokens": (self.max_batch_tokens, 64)
        }  # fmt: skip
        for name, (number, minimum) in bounds.items():
            if number < minimum:
                raise BadInput(f"--{name}: expected at least {minimum}, got {number}")

    def within(self, max_length: Optional[int], chosen: bool) -> Design:
        """Return the design for a server with this limit of prompt and output. Lengths that the user chose must fit."""
        if max_length is None:
            return self
        longest = max_length - self.output
        if longest < 1 or self.short_prompt + 2 * self.output > max_length or (chosen and self.lengths[-1] > longest):
            raise BadInput(
                f"--lengths, --output-tokens: expected at most {max_length} tokens of prompt and output, the "
                f"max_model_len of the server, got {self.lengths[-1]} and {self.output}"
            )
        return replace(self, lengths=[min(length, longest) for length in self.lengths])

    @property
    def short_prompt(self) -> int:
        """Prompt length of loads that measure decodes only."""
        return self.lengths[1 if len(self.lengths) > 2 else 0]

    def points(self) -> list[Point]:
        """Return the loads, small ones of every kind first: if a large one stops the server, they are already done."""
        singles = [Point("single", 1, prompt) for prompt in self.lengths]
        series = (singles, self._batches(), self._bursts(), self._busy())
        return [point for rank in zip_longest(*series) for point in rank if point is not None]

    def _batches(self) -> list[Point]:
        points, short = [], self.short_prompt
        for rows in self.batches:
            long = min(self.lengths[len(self.lengths) // 2], self.max_batch_tokens // rows - self.output)
            points += [Point("batch", rows, prompt) for prompt in sorted({short, max(short, long)})]
        return points

    def _bursts(self) -> list[Point]:
        pairs = [(rows, prompt) for rows in self.bursts for prompt in self._every_other()]
        return [Point("burst", rows, prompt) for rows, prompt in pairs if rows * prompt <= self.max_burst_tokens]

    def _busy(self) -> list[Point]:
        prompts = [prompt for prompt in self._every_other() if prompt <= self.max_burst_tokens]
        one_row = [Point("busy", 1, prompt) for prompt in prompts]
        rows = [rows for rows in self.batches if 1 < rows <= 8][-1:]
        return one_row + [Point("busy", rows[0], prompt) for prompt in prompts[1:2] if rows]

    def _every_other(self) -> Sequence[int]:
        return self.lengths[1::2] or self.lengths
