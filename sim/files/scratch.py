"""Temporary folders that a killed process does not leave behind for good: the next process removes them.

Each folder holds a locked file. The system releases the lock when the process dies, also in another container.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system: folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

PREFIX = "servesim-"
LOCK = ".lock"


class ScratchFolder:
    """A temporary folder, removed at the end of the block, by `cleanup`, or when the process ends."""

    def __init__(self) -> None:
        remove_abandoned()
        self.name = tempfile.mkdtemp(prefix=PREFIX)
        self.cleanup = weakref.finalize(self, _remove, self.name, _lock(self.name))

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def remove_abandoned() -> None:
    """Remove the folders of processes that are gone."""
    if fcntl is None:
        return
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # in use, of another user, or removed meanwhile
            handle = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(handle)


def _lock(folder: str) -> int:
    """Create the locked file of a folder; return its handle. It gets its name only when it is locked."""
    name = os.path.join(folder, LOCK)
    handle = os.open(name + ".new", os.O_RDWR | os.O_CREAT, 0o600)
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(name + ".new", name)
    return handle


def _remove(folder: str, handle: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)
