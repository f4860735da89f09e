"""answers.csv of an endpoint calibration: one row per request, with its client-side times.

Times are seconds since the start of the load. Failed loads are kept, with the outcomes of their requests. The rows of a
load are written together: if the process is killed, only the running load is lost.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from servesim.calibrate.client.load_generator import SentRequest
from servesim.core import BadInput, Request
from servesim.files.write import open_text

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
    writer = csv.writer(text, lineterminator="\n")
    if not path.exists():
        writer.writerow(COLUMNS)
    writer.writerows(csv_rows(load))
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(text.getvalue().encode())
            os.fsync(file.fileno())
    except OSError as error:
        raise BadInput(f"{path}: cannot write: {error.strerror}") from None


def write_loads(path: Path, loads: Iterable[LoadResult]) -> None:
    """Write a new file."""
    with open_text(path) as file:
        writer = csv.writer(file, lineterminator="\n")
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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot read: {error}") from None
    table = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
    loads: dict[tuple[str, int], LoadResult] = {}
    expected: dict[tuple[str, int], int] = {}  # requests per load
    for number, row in enumerate(table, 2):
        try:
            point = Point(row["kind"], int(row["rows"]), int(row["prompt_asked"]))
            load = LoadResult(point, int(row["round"]), float(row["began"]), [])
            load = loads.setdefault(load.key, load)
            expected[load.key] = int(row["requests"])
            load.sent_requests = [*load.sent_requests, parse_row(row)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"{path}:{number}: not a row of answers.csv ({error})") from None
    return [load for key, load in loads.items() if len(load.sent_requests) == expected[key]]


def parse_row(row: dict[str, str]) -> SentRequest:
    """Parse a request and its response."""
    request = Request(
        row["id"], float(row["due"]), int(row["prompt"]), int(row["output"]), follows=row["after"] or None
    )
    outcome = row["outcome"] if row["outcome"] != "unfinished" else None
    times = [float(time) for time in row["tokens"].split()]
    prompt = int(row["prompt_told"]) if row["prompt_told"] else None
    sent, end = (float(row[name]) if row[name] else None for name in ("sent", "end"))
    written, reason = int(row["written"]), row["reason"] or None
    return SentRequest(request, request.arrival, sent, times, written, prompt, end, outcome, reason)
