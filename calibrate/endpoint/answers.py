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
from servesim.core import BadInput, Request
from servesim.core.limits import MAX_INT, MAX_SECONDS
from servesim.files.read import quote, read_csv
from servesim.files.write import append, csv_writer, open_text

from .load_plan import Point

COLUMNS = (
    "kind", "rows", "prompt_asked", "round", "began", "requests",  # of the load
    "id", "prompt", "prompt_told", "output", "after", "due", "sent", "end", "written", "outcome", "reason", "tokens",
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
            if sent.written > len(sent.times) + 1:
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
    for number, row in enumerate(read_csv(path, COLUMNS, complete_lines=True), 2):
        try:
            point = Point(row["kind"], whole(row["rows"]), whole(row["prompt_asked"]))
            load = LoadResult(point, whole(row["round"]), finite(row["began"]), [])
            load = loads.setdefault(load.key, load)
            expected[load.key] = whole(row["requests"])
            load.sent_requests = [*load.sent_requests, parse_row(row)]
        except ValueError:
            got = quote(list(row.values()))
            raise BadInput(f"{path}: row {number}: expected a row of answers.csv, got {got}") from None
    return [load for key, load in loads.items() if len(load.sent_requests) == expected[key]]


def whole(text: str) -> int:
    """Return a count in a cell."""
    value = int(text)
    if not 0 <= value <= MAX_INT:
        raise ValueError(f"expected a whole number from 0 to {MAX_INT}, got {quote(text)}")
    return value


def finite(text: str) -> float:
    """Return a time in a cell, in seconds."""
    value = float(text)
    if not abs(value) <= MAX_SECONDS:
        raise ValueError(f"expected at most {MAX_SECONDS:g} seconds, got {quote(text)}")
    return value


def parse_row(row: dict[str, str]) -> SentRequest:
    """Parse a request and its response."""
    request = Request(
        row["id"], finite(row["due"]), whole(row["prompt"]), whole(row["output"]), follows=row["after"] or None
    )
    outcome = row["outcome"] if row["outcome"] != "unfinished" else None
    times = [finite(time) for time in row["tokens"].split()]
    prompt = whole(row["prompt_told"]) if row["prompt_told"] else None
    sent, end = (finite(row[name]) if row[name] else None for name in ("sent", "end"))
    written, reason = whole(row["written"]), row["reason"] or None
    return SentRequest(request, request.arrival, sent, times, written, prompt, end, outcome, reason)
