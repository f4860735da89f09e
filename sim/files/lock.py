"""Locks of files and folders, so that only one process writes. The system releases a lock when its process ends.

On a system without `flock`, or on a file system that cannot lock, two writers are not detected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from servesim.core import BadInput

from .read import show_path
from .write import write_errors

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def try_lock(handle: int) -> bool:
    """Lock an open file or folder until it is closed; return False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # for example a folder of a network file system
        return True
    return True


def second_writer(path: Path) -> BadInput:
    """Return the error of a process that finds a file or a folder locked."""
    return BadInput(f"{show_path(path)}: another process is writing to it; wait for it, or use another folder")


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Create and lock a folder until the block ends; raise BadInput if another process has locked it."""
    with write_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{show_path(folder)}: expected a folder to write to, found a file")
        folder.mkdir(parents=True, exist_ok=True)
    handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
    try:
        if handle is not None and not try_lock(handle):
            raise second_writer(folder)
        try:
            yield
        finally:
            with suppress(OSError):  # it holds files; without files, the command failed before it wrote one
                folder.rmdir()
    finally:
        if handle is not None:
            os.close(handle)
