"""answers.csv of an endpoint calibration: one row per request, with its client-side times.

Times are seconds since the start of the load. Failed loads are kept, with the outcomes of their requests. The rows of a
load are written together: if the process is killed, only the running load is lost.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from servesim.calibrate.client.load_generator import SentRequest
from servesim.core import Request
from servesim.core.limits import MAX_SECONDS
from servesim.files.csv_rows import CsvRow, read_csv
from servesim.files.write import append, csv_writer, open_text

from .load_plan import Point

MAX_JOINED = 2  # tokens per event, on average: with more, the events do not show the steps
COLUMNS = (
    "kind", "rows", "load_prompt", "round", "began", "requests",  # of the load
    "id", "prompt", "prompt_tokens", "output", "follows", "due", "sent_at", "ended_at", "written", "outcome", "reason",
    "token_times",
)  # fmt: skip


@dataclass
class LoadResult:
    """One run of a calibration load and its responses."""

    point: Point
    round: int
    began: float = 0.0  # seconds since the start of the calibration
    sent_requests: Sequence[SentRequest] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.point.name, self.round

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


def append_load(path: Path, load: LoadResult) -> None:
    """Add a load to the file."""
    text = io.StringIO()
    writer = csv_writer(text)
    if not path.exists() or not path.stat().st_size:  # also after a first write that failed
        writer.writerow(COLUMNS)
    writer.writerows(csv_rows(load))
    append(path, text.getvalue(), sync=True)


def write_loads(path: Path, loads: Iterable[LoadResult]) -> None:
    """Write a new file."""
    with open_text(path) as file:
        writer = csv_writer(file)
        writer.writerow(COLUMNS)
        for load in loads:
            writer.writerows(csv_rows(load))


def csv_rows(load: LoadResult) -> list[list[object]]:
    point = load.point
    about = [point.kind, point.rows, point.prompt, load.round, f"{load.began:.3f}", len(load.sent_requests)]
    return [
        [
            *about, s.request.id, s.request.prompt, s.prompt_tokens, s.request.output, s.request.follows,
            format_time(s.due), format_time(s.sent_at), format_time(s.ended_at), s.written, s.outcome or "unfinished",
            " ".join((s.reason or "").split()), " ".join(map(format_time, s.times)),
        ]
        for s in load.sent_requests
    ]  # fmt: skip


def format_time(value: Optional[float]) -> str:
    """Return a time in seconds with microseconds."""
    return "" if value is None else f"{value:.6f}"


def read_loads(path: Path) -> list[LoadResult]:
    """Read the loads that were written completely."""
    loads: dict[tuple[str, int], LoadResult] = {}
    expected: dict[tuple[str, int], int] = {}  # requests per load
    for row in read_csv(path, COLUMNS, complete_lines=True):
        point = Point(row["kind"], row.whole("rows"), row.whole("load_prompt"))
        load = LoadResult(point, row.whole("round"), seconds(row, "began"), [])
        load = loads.setdefault(load.key, load)
        expected[load.key] = row.whole("requests")
        load.sent_requests = [*load.sent_requests, parse_row(row)]
    return [load for key, load in loads.items() if len(load.sent_requests) == expected[key]]


def seconds(row: CsvRow, column: str) -> float:
    """Return a time in a cell."""
    return row.number(column, -MAX_SECONDS, MAX_SECONDS)


def parse_row(row: CsvRow) -> SentRequest:
    """Parse a request and its response."""
    request = Request(
        row["id"], seconds(row, "due"), row.whole("prompt"), row.whole("output"), follows=row["follows"] or None
    )
    outcome = row["outcome"] if row["outcome"] != "unfinished" else None
    times = row.numbers("token_times", -MAX_SECONDS, MAX_SECONDS)
    prompt = row.whole("prompt_tokens") if row["prompt_tokens"] else None
    sent, end = (seconds(row, name) if row[name] else None for name in ("sent_at", "ended_at"))
    written, reason = row.whole("written"), row["reason"] or None
    return SentRequest(request, request.arrival, sent, times, written, prompt, end, outcome, reason)
