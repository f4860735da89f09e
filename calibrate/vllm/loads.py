"""Loads for a vLLM server whose steps are recorded: single requests, bursts that grow, and two request rates.

The steps of all loads but the last are fitted. The last load has another rate, and checks the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from servesim.calibrate.client.load_generator import LoadGenerator, send
from servesim.calibrate.replay.http_client import Target, one_after_another
from servesim.calibrate.replay.replay import ProgressLine
from servesim.core import BadInput, Request
from servesim.core.content import content_of_pieces
from servesim.runs.build import copy_requests
from servesim.traces.make.synth import synthesise

SINGLE_LENGTHS = (2048, 16, 32, 64, 128, 256, 512, 1024, 16, 32, 64, 128)  # short ones twice: they show the front end
CONTINUED = (64, 128, 256, 512, 1024)  # tokens of the first prompt that a later one repeats: the server has cached them
ADDED_TOKENS = (16, 32, 64, 128)
SINGLE_OUTPUT = 6
EQUAL_REQUESTS, EQUAL_PROMPT, EQUAL_OUTPUT = 12, 32, 16  # they show the noise of the machine
FIRST_BURST, BURST_GROWTH = 8, 4
BURST_PART = 0.25  # of the seconds of a load: the last burst takes longer
FIT_RATE, CHECK_RATE = 0.5, 0.75  # of the requests per second of the last burst
MIN_REQUESTS = 50  # of a load with a rate
PROMPT_PART = 0.75  # of max_model_len
RELATIVE_SD = 0.7  # of lengths


class LoadFailed(RuntimeError):
    """A request failed: the server is gone, or refused it."""


@dataclass(frozen=True)
class LoadPlan:
    """Sizes of the loads: seconds of each one, mean prompt and output tokens."""

    seconds: float = 60.0
    prompt: int = 256
    output: int = 64

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("prompt-tokens", self.prompt), ("output-tokens", self.output)):
            if not 1 <= value <= 1e6:
                raise BadInput(f"--{name}: expected 1 to 1000000, got {value:g}")

    def workload(self, rate: float, max_model_len: int) -> dict[str, Any]:
        """Return a workload of this rate whose requests the server accepts."""
        prompt = int(PROMPT_PART * max_model_len)
        sizes = {}
        for name, mean, longest in (("prompt", self.prompt, prompt), ("output", self.output, max_model_len - prompt)):
            usual = min(mean, longest / 2)
            sizes[name] = {"mean": usual, "sd": RELATIVE_SD * usual, "max": longest}
        return {
            "requests": max(MIN_REQUESTS, round(rate * self.seconds)),
            "arrivals": {"kind": "poisson", "rate": float(f"{rate:.4g}")},
            "lengths": {"kind": "lognormal", **sizes},
        }


class Bursts(NamedTuple):
    """Bursts that were sent."""

    rate: float  # requests per second of the last one
    sizes: Sequence[int]  # requests of each one


@dataclass(frozen=True)
class LoadClient:
    """Sends the loads of a plan to one server."""

    target: Target
    plan: LoadPlan
    max_model_len: int
    max_num_seqs: int
    quiet: bool

    def send_singles(self, name: str) -> LoadGenerator:
        """Send requests one by one, each when the answer to the one before is complete.

        Some continue the first prompt. Chunks of long prompts, which other settings of the server have, also follow
        cached tokens.
        """
        longest = self.max_model_len // 2
        prompts = [(0, min(length, longest)) for length in SINGLE_LENGTHS]
        prompts += [(cached, added) for cached in CONTINUED if cached <= longest for added in ADDED_TOKENS]
        requests = [
            Request(f"{k}", 0.0, cached + added, SINGLE_OUTPUT, content=content_of_pieces([(0, cached), (k, added)]))
            for k, (cached, added) in enumerate(prompts)
        ]
        return self.send(name, one_after_another(requests))

    def send_equal(self, name: str, count: int) -> list[float]:
        """Send equal requests one by one; return the seconds from the first to the last token of each."""
        prompt = min(EQUAL_PROMPT, self.max_model_len // 2)
        chain = one_after_another([Request(f"{k}", 0.0, prompt, EQUAL_OUTPUT) for k in range(count)])
        return [sent.times[-1] - sent.times[0] for sent in self.send(name, chain).sent_requests]

    def send_bursts(self) -> Bursts:
        """Send bursts that grow until one is long enough, or fills all slots."""
        count, sizes = min(FIRST_BURST, self.max_num_seqs), []
        while True:
            sizes.append(count)
            workload = {**self.plan.workload(1.0, self.max_model_len), "requests": count}
            requests = [Request(one.id, 0.0, one.prompt, one.output) for one in synthesise(workload, count).requests]
            sent = self.send(f"burst of {count}", requests).sent_requests
            seconds = max(one.ended_at or 0.0 for one in sent)
            if seconds >= BURST_PART * self.plan.seconds or count >= self.max_num_seqs:
                return Bursts(count / seconds, sizes)
            count = min(BURST_GROWTH * count, self.max_num_seqs)

    def send_rate(self, rate: float) -> LoadGenerator:
        """Send random requests at this rate."""
        trace = synthesise(self.plan.workload(rate, self.max_model_len), seed=1)
        return self.send(f"{rate:.3g} requests/s", copy_requests(trace.requests))

    def send(self, name: str, requests: Sequence[Request]) -> LoadGenerator:
        """Send requests and wait for all answers; raise LoadFailed if one has none."""
        line = ProgressLine(name, len(requests), self.quiet)
        generator = send(self.target.url, self.target.make_api(name), requests, self.target.timeout, line)
        line.end()
        if generator.stopped:
            raise KeyboardInterrupt
        for sent in generator.sent_requests:
            if sent.outcome != "finished":
                raise LoadFailed(f"{name}: request {sent.request.id}: {sent.outcome}: {sent.reason}")
        return generator
