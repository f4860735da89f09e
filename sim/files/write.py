"""Write files. A file appears only when it is complete; a failed write is a one-line error and leaves the old file."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TextIO

from servesim.core import BadInput

from .csv_rows import mark_formula
from .read import PathLike, show_path

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# Names of open files: a new file in their place would not reach the reader.
STREAMS = ("/dev/std", "/dev/fd/", "/proc/")


class FileExists(BadInput):
    """The file exists and is not overwritten."""


@contextmanager
def write_errors(path: PathLike) -> Iterator[None]:
    """Turn an error of the system into BadInput. A closed pipe stays as it is: `sim ... | head` is not an error."""
    try:
        yield
    except OSError as error:
        raise _write_error(path, error) from None


@contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """Yield a temporary path in the same folder. When the block ends without an error, its file replaces `path`.

    For libraries that write a file themselves; the temporary name has the same suffix. Its folder is created.
    """
    with _temporary(path, True, True) as part, write_errors(path):
        yield part


@contextmanager
def open_text(path: PathLike, overwrite: bool = True, parents: bool = True) -> Iterator[TextIO]:
    """Open a text file for writing, gzipped if its name ends in .gz; it appears only when it is complete.

    `parents` creates its folder.
    """
    with _temporary(path, overwrite, parents) as part:
        with write_errors(path):
            raw = io.BufferedWriter(_File(part, path))
        packed: Optional[gzip.GzipFile] = None
        if str(path).endswith(".gz"):  # no time stamp, so that equal runs give equal bytes
            packed = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
        # A path can hold bytes that are not UTF-8: they are written as \udcXX.
        file = io.TextIOWrapper(packed or raw, encoding="utf-8", errors="backslashreplace", newline="")
        try:
            yield file
            file.close()
            raw.close()
        except BaseException:
            for opened in (file, raw):
                with suppress(BadInput):  # the buffer may hold text that cannot be written
                    opened.close()
            raise


def write_text(path: PathLike, text: str, overwrite: bool = True, parents: bool = True) -> None:
    """Write a text file, gzipped if its name ends in .gz; the same text gives the same bytes."""
    with open_text(path, overwrite, parents) as file:
        file.write(text)


def write_json(path: PathLike, value: Any, overwrite: bool = True) -> None:
    """Write a value as indented JSON."""
    with open_text(path, overwrite) as file:
        json.dump(value, file, indent=1, default=str)
        file.write("\n")


def write_yaml(path: PathLike, value: Any, comments: str = "", **options: Any) -> None:
    """Write a value as YAML below `comments`, which are complete lines."""
    write_text(path, comments + yaml_text(value, **options))


def comment(text: str) -> str:
    """Return a text as one comment line of YAML or of a shell. Names and values of settings can have line breaks."""
    return f"# {' '.join(''.join(letter if letter.isprintable() else ' ' for letter in text).split())}\n"


def yaml_text(value: Any, **options: Any) -> str:
    """Return a value as YAML."""
    import yaml  # not in the worker

    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, **options)
    return text


def check_new(path: Path, content: str) -> None:
    """Raise FileExists if a path, by which one knows a folder with this content, exists."""
    if path.exists():
        raise FileExists(f"{path.parent}: already holds a {content}, which is not overwritten; use another folder")


def list_files(folder: Path) -> list[Path]:
    """Return the content of a folder, without the temporary files of other writers."""
    return [path for path in folder.glob("*") if not (path.name.startswith(".") and ".part" in path.name)]


def save_figure(figure: Any, path: PathLike, **options: Any) -> None:
    """Write a chart of matplotlib. The suffix of the path is its format."""
    with replacing(path) as part:
        try:
            figure.savefig(part, format=Path(path).suffix[1:], **options)
        except (OSError, ValueError) as error:  # ValueError: an unknown format
            reason = getattr(error, "strerror", None) or str(error)[:100]
            raise BadInput(f"{show_path(path)}: cannot be drawn: {reason}") from None


def append(path: PathLike, text: str) -> None:
    """Add complete lines to the end of a file; a failed write leaves the file as it was."""
    with write_errors(path), open(path, "ab", buffering=0) as file:
        append_to(file, text.encode("utf-8", "backslashreplace"))


def append_to(file: io.FileIO, data: bytes) -> None:
    """Add bytes to the end of an open file without a buffer; before an OSError, remove what was written."""
    size = os.fstat(file.fileno()).st_size
    try:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        with suppress(OSError):  # for example a pipe
            file.truncate(size)
        raise


def write_rows(file: SupportsWrite[str], *tables: Iterable[Iterable[Any]], **options: Any) -> None:
    """Write the rows of tables as CSV. A text that a spreadsheet would run as a formula gets a leading `'`."""
    rows = (map(mark_formula, cells) for table in tables for cells in table)
    csv.writer(file, lineterminator="\n", **options).writerows(rows)


class _File(io.FileIO):
    """A file whose errors name the path that the user passed."""

    def __init__(self, part: Path, path: PathLike) -> None:
        super().__init__(part, "wb")
        self._path = path

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _write_error(self._path, error) from None

    def close(self) -> None:
        with write_errors(self._path):
            super().close()


@contextmanager
def _temporary(path: PathLike, overwrite: bool, parents: bool) -> Iterator[Path]:
    """Yield a new name in the folder of `path`; rename it at the end, or remove its file after an error."""
    with write_errors(path):
        stream = _is_stream(path)
    if stream:  # a pipe, or a device such as /dev/null: nothing to replace
        yield Path(path)
        return
    with write_errors(path):
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise BadInput(f"{show_path(path)}: expected a file, found a folder")
        if not overwrite and target.exists():
            raise _exists(path)
        if target.exists() and not os.access(target, os.W_OK):
            raise BadInput(f"{show_path(path)}: cannot be written: the file is read-only")
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        # The name is short, because the name of the file may have the greatest length, and unique for each process.
        part = target.with_name(f".{os.getpid()}-{os.urandom(4).hex()}.part{target.suffix[:20]}")
    try:
        yield part
        with write_errors(path):
            if overwrite:
                if target.exists():
                    os.chmod(part, stat.S_IMODE(target.stat().st_mode))
                os.replace(part, target)
            else:
                _rename_new(part, target, path)
    finally:
        with suppress(OSError):
            part.unlink()


def _rename_new(part: Path, target: Path, path: PathLike) -> None:
    """Rename a file to a name that another process may have taken meanwhile."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise _exists(path) from None
    except OSError:  # a file system without links
        os.rename(part, target)


def _exists(path: PathLike) -> FileExists:
    return FileExists(f"{show_path(path)}: exists already and is not overwritten; use another name")


def _is_stream(path: PathLike) -> bool:
    if str(path).startswith(STREAMS):
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    except ValueError:
        raise BadInput(f"{show_path(path)}: expected a file name, got unusable characters") from None
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _write_error(path: PathLike, error: OSError) -> Exception:
    if isinstance(error, BrokenPipeError):
        return error
    return BadInput(f"{show_path(path)}: cannot be written: {error.strerror or error}")
