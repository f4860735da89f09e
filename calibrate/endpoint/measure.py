"""Measure a black-box server: run calibration loads over HTTP and write every response to answers.jsonl.

A failed load is kept. The next load waits until the server responds normally again; if it does not, the run ends early.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.calibrate.client.load_generator import LoadGenerator, SentRequest, send
from servesim.calibrate.client.prompts import Prompts
from servesim.calibrate.client.protocols import Api, LlmServing, OpenAI, TextCompletions
from servesim.calibrate.client.server_counters import served_model
from servesim.core import BadInput, Request
from servesim.files.read import quote
from servesim.study.journal import Journal
from servesim.study.progress import Progress

from .answers import LoadLine, LoadResult, loads_of
from .load_plan import Design, Point, ServerSpeed

ANSWERS = "answers.jsonl"
MAX_FAILED_CHECKS = 3  # of a server after a failed load
MAX_ADDED_TOKENS = 4  # by a server to a text; a larger difference means that a word is not one token
BUSY_RATIO = 3.0  # of the usual time: a slower response means that the server still works on something else
CHECK_INTERVAL_S = 0.5  # between two checks


@dataclass
class EndpointClient:
    """Sends loads to one server."""

    url: str
    api: Api
    timeout: float
    max_length: Optional[int] = None  # prompt and output tokens of a request, if the server says it
    usual_seconds: float = 1.0  # of a small request on an idle server

    @property
    def about(self) -> dict[str, Any]:
        """What a resumed calibration must have in common with the first part."""
        return {"url": self.url, "api": type(self.api).__name__, "model": self.api.model}

    def send(self, requests: Sequence[Request]) -> LoadGenerator:
        """Send requests and wait for all responses."""
        return send(self.url, self.api, requests, self.timeout)

    def send_small(self, id: str) -> tuple[SentRequest, bool]:
        """Send one small request; return it, and whether the user interrupted it."""
        load = self.send([Request(id, 0.0, 16, 4)])
        return load.sent_requests[0], load.stopped

    def wait_until_healthy(self) -> Optional[str]:
        """Wait until the server responds at its usual speed; return the problem if it does not."""
        deadline, failures = time.monotonic() + self.timeout, 0
        while True:
            sent, stopped = self.send_small(f"check {time.monotonic_ns()}")
            if stopped:
                raise KeyboardInterrupt
            if sent.outcome != "finished":
                failures += 1
                if failures == MAX_FAILED_CHECKS or sent.outcome == "timed out":
                    return f"{sent.outcome}: {sent.reason}"
            elif duration(sent) <= BUSY_RATIO * self.usual_seconds + 0.05:
                return None
            if time.monotonic() > deadline:
                return f"small requests still take {duration(sent):.3g} s instead of {self.usual_seconds:.3g} s"
            time.sleep(CHECK_INTERVAL_S)


def duration(sent: SentRequest) -> float:
    return (sent.ended_at or 0.0) - (sent.sent_at or 0.0)


def detect_api(url: str, api: str, model: Optional[str], timeout: float, prompt_seed: str) -> EndpointClient:
    """Return a client for the server. Raises BadInput if the server does not answer a small request.

    A new seed gives prompts that the server cannot have cached.
    """
    max_length, prompts = None, Prompts(prompt_seed)
    if api == "llm-serving":
        candidates: Sequence[Api] = [LlmServing(prompts)]
    else:
        name, max_length = served_model(url, model)
        # Token ids are exact, but some servers do not accept them.
        candidates = [OpenAI(name, prompts), TextCompletions(name, prompts)]
    for candidate in candidates:
        client = EndpointClient(url, candidate, timeout, max_length)
        sent, stopped = client.send_small("contact")
        if stopped:
            raise KeyboardInterrupt
        if sent.outcome == "finished":
            if isinstance(candidate, TextCompletions):
                candidate.added_tokens = added_tokens(sent)
            second, _ = client.send_small("contact again")  # the first can include a cold start
            client.usual_seconds = duration(second) if second.outcome == "finished" else duration(sent)
            return client
        if sent.outcome in ("broken", "timed out"):
            break
    raise BadInput(f"--url {url} --api {api}: the server does not answer a request: {sent.outcome}: {sent.reason}")


def added_tokens(sent: SentRequest) -> int:
    """Return the tokens that the server added to a text, such as BOS; 0 if it does not report its count."""
    added = (sent.prompt_tokens or 0) - sent.request.prompt
    return added if 0 < added <= MAX_ADDED_TOKENS else 0


@dataclass
class Measurements:
    """All loads that were run."""

    loads: list[LoadResult] = field(default_factory=list)
    planned: Sequence[Point] = ()  # of each round
    rounds: int = 1
    skipped: list[str] = field(default_factory=list)  # loads that failed twice before
    end_reason: Optional[str] = None  # if it ended early

    @property
    def count(self) -> int:
        """Return the number of planned loads."""
        return len(self.planned) * self.rounds

    @property
    def good(self) -> list[LoadResult]:
        """Return the loads without a failure."""
        return [load for load in self.loads if load.failure is None]

    @property
    def failed(self) -> dict[str, str]:
        """Return the failed loads with the reason."""
        return {load.name: why for load in self.loads if (why := load.failure)}


@dataclass
class MeasurementRun:
    """Runs the loads of a design on a server."""

    client: EndpointClient
    design: Design
    journal: Journal  # open
    budget: float  # seconds after which no new load starts
    measured: Measurements = field(default_factory=Measurements)
    speed: ServerSpeed = field(default_factory=ServerSpeed)
    _seconds: dict[Point, float] = field(default_factory=dict)  # of the last run of a load
    _failures: dict[Point, int] = field(default_factory=dict)

    def run(self, progress: Progress) -> Measurements:
        """Run the loads, round by round, within the time budget. An interrupt ends it and keeps the results."""
        start, points = time.monotonic(), self.design.points()
        done = {load.name for load in self.measured.loads}
        self.measured.planned, self.measured.rounds = points, self.design.rounds
        progress.expect(self.measured.count, len(done))
        try:
            for number in range(self.design.rounds):
                for point in points:
                    load = LoadResult(point, number)
                    if load.name in done:
                        continue
                    spent = time.monotonic() - start
                    if spent + self._seconds.get(point, 0.0) > self.budget:
                        self.measured.end_reason = f"the time budget of {self.budget:g} s is spent"
                        return self.measured
                    if self._failures.get(point, 0) < 2:
                        self._run_load(load)
                    else:
                        self.measured.skipped.append(load.name)
                    if self.measured.end_reason:
                        return self.measured
                    progress.advance(1)
        except KeyboardInterrupt:
            self.measured.end_reason = "interrupted"
        return self.measured

    def _run_load(self, load: LoadResult) -> None:
        """Run one load and record it. After a failure, wait until the server is healthy again."""
        start = time.monotonic()
        requests = load.point.requests(load.name, self.design.output, self.design.short_prompt, self.speed)
        generator = self.client.send(requests)
        if generator.stopped:
            raise KeyboardInterrupt
        load.sent_requests = generator.sent_requests
        self._seconds[load.point] = time.monotonic() - start
        self.journal.append([load.record(self.client.about)])
        self.journal.sync()
        self.measured.loads.append(load)
        if load.failure is None:
            self._update_speed(load)
            return
        timed_out = any(sent.outcome == "timed out" for sent in load.sent_requests)
        self._failures[load.point] = self._failures.get(load.point, 0) + (2 if timed_out else 1)
        problem = self.client.wait_until_healthy()
        if problem is not None:
            name = load.point.name
            self.measured.end_reason = f"the server no longer answers since {name} ({load.failure}): {problem}"

    def _update_speed(self, load: LoadResult) -> None:
        sent = load.sent_requests[0]
        if load.point.kind == "single" and load.point.prompt <= self.design.short_prompt and len(sent.times) > 2:
            ttft, step = sent.times[0] - (sent.sent_at or 0.0), float(np.median(np.diff(sent.times)))
            self.speed = ServerSpeed(ttft, step)


def measure_endpoint(
    client: EndpointClient, design: Design, folder: Path, budget: float, resume: bool, quiet: bool
) -> Measurements:
    """Measure into a folder, or resume an earlier run of the same server; failed loads run again."""
    path = folder / ANSWERS
    with Journal(path, LoadLine) as journal, Progress("calibrate endpoint", quiet, unit="load") as progress:
        if journal.records and not resume:
            raise BadInput(f"{path}: already holds measurements; continue with --resume or use another folder")
        for record in journal.records:
            if record["server"] != client.about:
                earlier = quote(record["server"])
                raise BadInput(f"{path}: measured on {earlier}, not on {client.about}; use another folder")
        measured = Measurements([load for load in loads_of(journal.records) if load.failure is None])
        return MeasurementRun(client, design, journal, budget, measured).run(progress)
