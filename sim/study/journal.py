"""The journal of an experiment: runs.jsonl, one line per run, append-only.

A kill or a full disk can leave an incomplete last line; opening the journal removes it. Only one process may write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

from pydantic import Field, model_validator
from servesim.core import BadInput
from servesim.files.checked import Index, Stored, StoredNumber, validate
from servesim.files.lock import second_writer, try_lock
from servesim.files.write import append_to, write_errors
from servesim.runs.request_rows import STATES

from .single_run import Record


class RunLine(Stored):
    """The keys of one line: those of a finished run, the error of a failed one, or why the engine refuses to start."""

    config: Index
    replication: Index
    draw: Optional[Index] = None  # with a random cost model
    rate: Optional[StoredNumber] = None  # requests per second, of an experiment with rates
    seed: Optional[int] = None
    assignment: Optional[dict[str, Any]] = None  # the line of a search
    error: Optional[str] = None
    machine: bool = False  # the machine failed, so a resumed experiment repeats the run; its last line counts
    metrics: dict[str, StoredNumber] = Field({})
    time_breakdown: dict[str, StoredNumber] = Field({})  # seconds of a request in each state; empty: none served
    saturated: bool = False
    outside_profile: list[str] = Field([])
    stuck: Optional[str] = None
    refused: list[str] = Field([])  # why the real engine does not start with this configuration

    @model_validator(mode="after")
    def _has_result(self) -> RunLine:
        states = not self.time_breakdown or set(STATES) <= set(self.time_breakdown)
        if (
            self.error is None
            and not self.refused
            and not (states and {"metrics", "time_breakdown"} <= self.model_fields_set)
        ):
            raise ValueError(f"metrics and time_breakdown ({', '.join(STATES)}), or an error")
        return self


class Journal:
    """An open journal; use it as a context manager."""

    def __init__(self, path: Path, line: type[Stored] = RunLine) -> None:
        self.path = path
        self.line = line  # the keys of a line
        self.records: list[Record] = []  # that the file held when it was opened, in order

    def __enter__(self) -> Journal:
        check_kind(self.path)
        with write_errors(self.path):
            self._file = open(self.path, "a+b", buffering=0)
        if not try_lock(self._file.fileno()):
            self._file.close()
            raise second_writer(self.path)
        self._file.seek(0)
        text = self._file.read()
        size = text.rfind(b"\n") + 1
        if size < len(text):
            self._file.truncate(size)
        self.records = list(parse_records(text[:size], self.path, self.line))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, records: Iterable[Record]) -> None:
        """Write one line per record. A failed write leaves no incomplete line."""
        lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in records]
        try:
            append_to(self._file, "".join(lines).encode())
        except OSError as error:
            hint = "free disk space, then continue with --resume"
            raise OSError(f"{self.path}: {error.strerror}; {hint}") from None

    def sync(self) -> None:
        """Flush the file to disk, so that it survives a power failure."""
        os.fsync(self._file.fileno())


def parse_records(text: bytes, path: Path, kind: type[Stored] = RunLine) -> Iterator[Record]:
    """Yield the record of each line."""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}:{number}: not a journal line"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise BadInput(f"{where}; expected the JSON object of a run") from None
        validate(kind, record, where)
        yield record


def read_journal(path: Path) -> list[Record]:
    """Return the complete lines of a journal, which another process may be writing."""
    check_kind(path)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return list(parse_records(text[: text.rfind(b"\n") + 1], path))


def check_kind(path: Path) -> None:
    """Reject a journal that is a folder, a pipe or a device: reading a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: expected a file")
