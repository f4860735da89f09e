"""The journal of an experiment: runs.jsonl, one line per run, append-only.

A kill or a full disk can leave an incomplete last line; opening the journal removes it. Only one process may write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from servesim.core import BadInput

from .single_run import Record


class DiskFull(OSError):
    """The write failed. The journal holds only complete lines."""


class Journal:
    """An open journal; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []  # that the file held when it was opened, in order

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
        self.records = list(parse_records(text[: self._size], self.path))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, records: Iterable[Record]) -> None:
        """Write one line per record. A failed write leaves no incomplete line."""
        data = b"".join(encode_record(record) for record in records)
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            self._file.truncate(self._size)
            raise DiskFull(f"{self.path}: {error.strerror}; free disk space, then continue with --resume") from None
        self._size += len(data)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system: two writers are not detected
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BadInput(
                f"{self.path}: another process is writing to it; wait for it, or use another folder"
            ) from None


def encode_record(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def parse_records(text: bytes, path: Path) -> Iterator[Record]:
    """Yield the record of each line."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            record["config"], record["replication"]
        except (ValueError, TypeError, KeyError):
            raise BadInput(f"{path}:{number}: not a journal line; expected the JSON object of a run") from None
        yield record


def read_journal(path: Path) -> list[Record]:
    """Return the complete lines of a journal, which another process may be writing."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return list(parse_records(text[: text.rfind(b"\n") + 1], path))


def sync(path: Path) -> None:
    """Flush a file to disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
