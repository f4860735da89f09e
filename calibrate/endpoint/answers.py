"""answers.csv of a calibrated endpoint: every request of every load, as its client saw it.

Times are seconds since the load began. A load that fails is kept; the outcomes of its requests say so. Rows of a load
are written together: a kill costs only the load that was running.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from servesim.calibrate.client.load_generator import Sending
from servesim.core import BadInput, Request
from servesim.files.write import open_text

from .load_plan import Point

COLUMNS = (
    "kind", "rows", "prompt_asked", "round", "began", "requests",  # of the load
    "id", "prompt", "prompt_told", "output", "after", "due", "sent", "end", "written", "outcome", "reason", "tokens",
)  # fmt: skip


@dataclass
class Taken:
    """A load that was given, and what its clients saw."""

    point: Point
    round: int
    began: float = 0.0  # seconds since the calibration began
    sendings: Sequence[Sending] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.point.name, self.round

    @property
    def failure(self) -> Optional[str]:
        """Say why it cannot be used, or None."""
        for sending in self.sendings:
            if sending.outcome != "finished":
                return f"{sending.outcome or 'unfinished'}: {sending.reason or 'no answer'}"
            if not sending.times:
                return "an answer without a token"
            if sending.written > len(sending.times) + 1:
                return f"{sending.written} tokens came in {len(sending.times)} pieces: its steps cannot be told apart"
        return None if self.sendings else "no requests"


def append(path: Path, taken: Taken) -> None:
    """Add a load to the file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not path.exists():
        writer.writerow(COLUMNS)
    writer.writerows(rows(taken))
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(text.getvalue().encode())
            os.fsync(file.fileno())
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None


def write(path: Path, loads: Iterable[Taken]) -> None:
    """Write a new file."""
    with open_text(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for taken in loads:
            writer.writerows(rows(taken))


def rows(taken: Taken) -> list[list[object]]:
    point = taken.point
    load = [point.kind, point.rows, point.prompt, taken.round, f"{taken.began:.3f}", len(taken.sendings)]
    return [
        [
            *load, s.request.id, s.request.prompt, s.prompt, s.request.output, s.request.after,
            seconds(s.due), seconds(s.sent), seconds(s.end), s.written, s.outcome or "unfinished",
            " ".join((s.reason or "").split()), " ".join(map(seconds, s.times)),
        ]
        for s in taken.sendings
    ]  # fmt: skip


def seconds(value: Optional[float]) -> str:
    """Return a time to the microsecond."""
    return "" if value is None else f"{value:.6f}"


def read(path: Path) -> list[Taken]:
    """Read the loads that are there as a whole."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    table = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
    loads: dict[tuple[str, int], Taken] = {}
    whole: dict[tuple[str, int], int] = {}
    for number, row in enumerate(table, 2):
        try:
            point = Point(row["kind"], int(row["rows"]), int(row["prompt_asked"]))
            taken = Taken(point, int(row["round"]), float(row["began"]), [])
            taken = loads.setdefault(taken.key, taken)
            whole[taken.key] = int(row["requests"])
            taken.sendings = [*taken.sendings, sending(row)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"{path}:{number}: not a row of such answers ({error})") from None
    return [taken for key, taken in loads.items() if len(taken.sendings) == whole[key]]


def sending(row: dict[str, str]) -> Sending:
    """Read a request and what its client saw."""
    request = Request(row["id"], float(row["due"]), int(row["prompt"]), int(row["output"]), after=row["after"] or None)
    outcome = row["outcome"] if row["outcome"] != "unfinished" else None
    times = [float(time) for time in row["tokens"].split()]
    prompt = int(row["prompt_told"]) if row["prompt_told"] else None
    sent, end = (float(row[name]) if row[name] else None for name in ("sent", "end"))
    written, reason = int(row["written"]), row["reason"] or None
    return Sending(request, request.arrival, sent, times, written, prompt, end, outcome, reason)
