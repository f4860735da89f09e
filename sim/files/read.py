"""Read and write text files, plain or gzipped. Errors give the row number, starting at 1."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, Union

from servesim.core import BadInput

PathLike = Union[str, Path]


def read_text(path: PathLike) -> str:
    """Return the text of a file, unpacked if it is gzipped; raise BadInput if it cannot be read."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise BadInput(f"{path}: row 1: damaged gzip file: {error}") from None
    if b"\0" in data:
        raise BadInput(f"{path}: row {_row_number(data, data.index(0))}: expected text, got binary data")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: row {_row_number(data, error.start)}: expected UTF-8 text, got binary data") from None
    if not text.strip():
        raise BadInput(f"{path}: row 1: the file is empty")
    return text


def write_text(path: PathLike, text: str) -> None:
    """Write a file, gzipped if its name ends in .gz; the same text gives the same bytes."""
    data = text.encode()
    try:
        Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror or error}") from None


def parse_json(path: PathLike, text: str, row: int = 1) -> Any:
    """Parse a JSON text; the error names the row."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except json.JSONDecodeError as error:
        position = f"row {row + error.lineno - 1}, column {error.colno}"
        raise BadInput(f"{path}: {position}: expected JSON, got {quote(text[error.pos : error.pos + 60])}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: row {row}: expected JSON: {str(error)[:80]}") from None


def quote(value: Any) -> str:
    """Return a value for an error message: one line, at most 48 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # for example an integer with too many digits to print
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 48 else text[:45] + "..."


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _row_number(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1
