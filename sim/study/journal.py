"""The journal of an experiment: runs.jsonl, one line a run, only ever appended to.

Lines are whole or torn: a torn last line, which a kill or a full disk leaves, is dropped when the journal is opened
again. One process at a time may write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from servesim.core import BadInput

from .single_run import Record


class DiskFull(OSError):
    """What was to be written could not be; what is there is whole."""


class Journal:
    """An open journal; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []  # those found when it was opened, in order

    def __enter__(self) -> Journal:
        try:
            self._file = open(self.path, "a+b", buffering=0)
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be written: {error.strerror}") from None
        self._lock()
        self._file.seek(0)
        text = self._file.read()
        self._size = text.rfind(b"\n") + 1
        if self._size < len(text):
            self._file.truncate(self._size)
        self.records = list(parsed(text[: self._size], self.path))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, records: Iterable[Record]) -> None:
        """Write some lines; they are all there, or none that is torn."""
        data = b"".join(line_of(record) for record in records)
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            self._file.truncate(self._size)
            raise DiskFull(f"{self.path}: {error.strerror}; make room, then continue with --resume") from None
        self._size += len(data)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system: nobody stops a second writer
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BadInput(f"{self.path}: another sweep is writing to it") from None


def line_of(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def parsed(text: bytes, path: Path) -> Iterator[Record]:
    """Return the records of whole lines."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            record["config"], record["replication"]
        except (ValueError, TypeError, KeyError):
            raise BadInput(f"{path}:{number}: not a line of a journal; expected a JSON object of a run") from None
        yield record


def read_journal(path: Path) -> list[Record]:
    """Return the whole lines of a journal that somebody may be writing."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return list(parsed(text[: text.rfind(b"\n") + 1], path))


def sync(path: Path) -> None:
    """Make a file outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
