"""answers.jsonl of an endpoint calibration: one line per load, with the server and the times that the client measured.

Times are seconds since the start of the load. Failed loads are kept; if a load ran again, its last line counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Optional

from servesim.calibrate.client.load_generator import SentRequest
from servesim.core import Request
from servesim.files.checked import Index, Stored, StoredNumber

from .load_plan import Point

MAX_JOINED = 2  # tokens per event, on average: with more, the events do not show the steps


class Answer(Stored):
    """A request and its response: fields of `Request`, then of `SentRequest`."""

    id: str
    prompt: Index
    output: Index
    sent_at: Optional[StoredNumber]
    times: list[StoredNumber]
    output_tokens: Optional[Index]
    prompt_tokens: Optional[Index]
    ended_at: Optional[StoredNumber]
    outcome: Optional[str]
    reason: Optional[str]


class LoadLine(Stored):
    """A line of the file."""

    server: dict[str, Any]
    kind: Literal["single", "batch", "burst", "busy"]
    rows: Index
    prompt: Index
    round: Index
    answers: list[Answer]


@dataclass
class LoadResult:
    """One run of a calibration load and its responses."""

    point: Point
    round: int
    sent_requests: Sequence[SentRequest] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.point.name} #{self.round + 1}"

    @property
    def failure(self) -> Optional[str]:
        """The reason why the load cannot be used, or None."""
        for sent in self.sent_requests:
            if sent.outcome != "finished":
                return f"{sent.outcome or 'unfinished'}: {sent.reason or 'no response'}"
            if not sent.times:
                return "a response without a token"
            if sent.written > MAX_JOINED * len(sent.times):
                return f"{sent.written} tokens arrived in {len(sent.times)} events: cannot separate the steps"
        return None if self.sent_requests else "no requests"

    def record(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line of the file."""
        names = list(Answer.model_fields)[3:]
        answers = []
        for sent in self.sent_requests:
            request = {"id": str(sent.request.id), "prompt": sent.request.prompt, "output": sent.request.output}
            answers.append({**request, **{name: getattr(sent, name) for name in names}})
        return {"server": dict(server), **asdict(self.point), "round": self.round, "answers": answers}


def loads_of(records: Iterable[Mapping[str, Any]]) -> list[LoadResult]:
    """Return the loads of a journal."""
    loads = {}
    for line in map(LoadLine.model_validate, records):
        sent = [
            SentRequest(Request(row.pop("id"), 0.0, row.pop("prompt"), row.pop("output")), 0.0, **row)
            for row in (answer.model_dump(include=set(Answer.model_fields)) for answer in line.answers)
        ]
        load = LoadResult(Point(line.kind, line.rows, line.prompt), line.round, sent)
        loads[load.name] = load
    return list(loads.values())
