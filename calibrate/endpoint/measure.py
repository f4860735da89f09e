"""Calibrate a server that one cannot look into: designed loads over HTTP, every answer kept, then a fit.

A failed load is kept, and the next one waits until the server answers as before. If it does not, the rest is fitted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.calibrate.client.load_generator import Load, Sending, first_model, send
from servesim.calibrate.client.protocols import Api, OpenAI
from servesim.core import BadInput, Request
from servesim.files.write import write_json
from servesim.study.progress import Progress

from .answers import Taken, append, read, write
from .load_plan import Design, Pace, Point, TextCompletions, Words

ANSWERS, MANIFEST = "answers.csv", "manifest.json"
TRIES = 3  # to reach a server that has just failed
SLOW = 3.0  # times the usual: an answer by which the server still has something else to do
PAUSE = 0.5  # between two looks at a server that has failed


@dataclass
class Caller:
    """How a server is spoken to."""

    url: str
    api: Api
    timeout: float
    usual: float = 1.0  # seconds that a small request takes when nobody else is there

    def send(self, requests: Sequence[Request]) -> Load:
        """Give a load and wait for its end."""
        return send(self.url, self.api, requests, self.timeout)

    def small(self, salt: str) -> tuple[Sending, bool]:
        """Send one small request; return it, and whether the user stopped it."""
        load = self.send([Request(f"{salt}/small", 0.0, 16, 4)])
        return load.sendings[0], load.stopped

    def comes_back(self, salt: str) -> Optional[str]:
        """Wait until the server is as it was before; say what is wrong if it does not come back."""
        until, failures = time.monotonic() + self.timeout, 0
        while True:
            sending, stopped = self.small(f"{salt}/{time.monotonic_ns()}")
            if stopped:
                raise KeyboardInterrupt
            if sending.outcome != "finished":
                failures += 1
                if failures == TRIES or sending.outcome == "timed out":
                    return f"{sending.outcome}: {sending.reason}"
            elif duration(sending) <= SLOW * self.usual + 0.05:
                return None
            if time.monotonic() > until:
                return f"small requests still take {duration(sending):.3g} s instead of {self.usual:.3g} s"
            time.sleep(PAUSE)


def duration(sending: Sending) -> float:
    return (sending.end or 0.0) - (sending.sent or 0.0)


def contact(url: str, api: str, model: Optional[str], timeout: float, salt: str) -> Caller:
    """Find out how to speak to a server; a request that it does not answer is bad input."""
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"--url: expected http://HOST:PORT, got {url!r}")
    if api == "llm-serving":
        ways: Sequence[Api] = [Words()]
    else:
        name = model or first_model(url)
        ways = [OpenAI(name), TextCompletions(name)]  # token ids are exact, but not every server takes them
    for way in ways:
        caller = Caller(url, way, timeout)
        sending, stopped = caller.small(f"{salt}/contact")
        if stopped:
            raise KeyboardInterrupt
        if sending.outcome == "finished":
            again, _ = caller.small(f"{salt}/contact again")  # the first may have been a cold start
            caller.usual = duration(again) if again.outcome == "finished" else duration(sending)
            return caller
        if sending.outcome in ("broken", "timed out"):
            break
    raise BadInput(f"--url {url} --api {api}: a first request is not answered: {sending.outcome}: {sending.reason}")


@dataclass
class Measured:
    """What came of a design."""

    loads: list[Taken] = field(default_factory=list)
    planned: int = 0
    ended: Optional[str] = None  # why it ended before its end

    @property
    def good(self) -> list[Taken]:
        """Return the loads that went as they should."""
        return [taken for taken in self.loads if taken.failure is None]

    @property
    def failed(self) -> dict[str, str]:
        """Return the failed loads and why."""
        return {f"{taken.point.name} #{taken.round + 1}": why for taken in self.loads if (why := taken.failure)}


@dataclass
class Calibration:
    """A design on its way through a server."""

    caller: Caller
    design: Design
    answers: Path
    budget: float  # seconds after which no further load is begun
    salt: str
    measured: Measured = field(default_factory=Measured)
    pace: Pace = field(default_factory=Pace)
    _took: dict[Point, float] = field(default_factory=dict)
    _failures: dict[Point, int] = field(default_factory=dict)

    def run(self, progress: Progress) -> Measured:
        """Give all loads there is time for, round by round; an interrupt ends it with what there is."""
        began, points = time.monotonic(), self.design.points()
        done = {taken.key for taken in self.measured.loads}
        self.measured.planned = len(points) * self.design.rounds
        progress.expect(self.measured.planned, len(done))
        try:
            for number in range(self.design.rounds):
                for point in points:
                    if (point.name, number) in done:
                        continue
                    spent = time.monotonic() - began
                    if spent + self._took.get(point, 0.0) > self.budget:
                        self.measured.ended = f"the time budget of {self.budget:g} s is spent"
                        return self.measured
                    if self._failures.get(point, 0) < 2:
                        self._give(Taken(point, number, spent))
                    if self.measured.ended:
                        return self.measured
                    progress.advance(1)
        except KeyboardInterrupt:
            self.measured.ended = "interrupted"
        return self.measured

    def _give(self, taken: Taken) -> None:
        """Give one load, keep what came of it, and see to it that the server is fit for the next."""
        salt = f"{self.salt}/{taken.point.name}/{taken.round}"
        start = time.monotonic()
        load = self.caller.send(taken.point.requests(salt, self.design.output, self.design.short, self.pace))
        if load.stopped:
            raise KeyboardInterrupt
        taken.sendings = load.sendings
        self._took[taken.point] = time.monotonic() - start
        append(self.answers, taken)
        self.measured.loads.append(taken)
        if taken.failure is None:
            self._learn(taken)
            return
        timed_out = any(sending.outcome == "timed out" for sending in load.sendings)
        self._failures[taken.point] = self._failures.get(taken.point, 0) + (2 if timed_out else 1)
        wrong = self.caller.comes_back(salt)
        if wrong is not None:
            self.measured.ended = f"the server no longer answers since {taken.point.name} ({taken.failure}): {wrong}"

    def _learn(self, taken: Taken) -> None:
        sending = taken.sendings[0]
        if taken.point.kind == "single" and taken.point.prompt <= self.design.short and len(sending.times) > 2:
            self.pace = Pace(sending.times[0] - (sending.sent or 0.0), float(np.median(np.diff(sending.times))))


def calibrate(
    caller: Caller, design: Design, folder: Path, budget: float, salt: str, resume: bool, quiet: bool
) -> Measured:
    """Measure into a folder, or go on where an earlier run of the same kind ended; its failed loads are given again."""
    answers, manifest = folder / ANSWERS, folder / MANIFEST
    measured = Measured()
    about = {"url": caller.url, "api": type(caller.api).__name__, "model": getattr(caller.api, "model", None)}
    if answers.exists():
        if not resume:
            raise BadInput(f"{answers}: there are answers already; --resume goes on with them, or name another folder")
        same(manifest, about)
        measured.loads = [taken for taken in read(answers) if taken.failure is None]
        write(answers, measured.loads)
    write_json(manifest, {**about, "design": asdict(design), "salt": salt})
    with Progress("calibrate endpoint", quiet, unit="load") as progress:
        return Calibration(caller, design, answers, budget, salt, measured).run(progress)


def same(manifest: Path, about: dict[str, Any]) -> None:
    """Refuse to mix two servers in one folder."""
    try:
        known = json.loads(manifest.read_text(encoding="utf-8"))
        was = {key: known.get(key) for key in about}
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{manifest}: cannot be read, so nobody knows whose answers these are: {error}") from None
    for key, value in about.items():
        if was[key] != value:
            raise BadInput(f"{manifest}: {key}: its answers are of {was[key]}, not of {value}; name another folder")
