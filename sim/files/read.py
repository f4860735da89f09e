"""Read text and JSON files, plain or gzipped. Every fault is a one-line error; row numbers start at 1."""

from __future__ import annotations

import difflib
import gzip
import io
import json
import math
import os
import re
import reprlib
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional, Union

from servesim.core import BadInput
from servesim.core.errors import cut_middle

PathLike = Union[str, Path]
MAX_BYTES = 2**31  # of a file, unpacked
MAX_RATIO = 200  # unpacked bytes per packed byte; traces reach about 20
SMALL_BYTES = 2**26  # a file may always unpack to this size
MAX_QUOTE = 48  # characters of a value in a message
MAX_DIGITS = 300  # of a number; a float holds about 308
OPEN_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # pipes that the shell has opened: `| sim`, `<(command)`
STDIN_NAME = "standard input"
KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
UNUSUAL_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS}}}|[eE]\+?[0-9]{{3}}")


def read_bytes(path: PathLike, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a file, unpacked if it is gzipped."""
    name = show_path(path)
    try:
        info = os.stat(path)
        mode = info.st_mode
        is_open_pipe = stat.S_ISFIFO(mode) and os.fspath(path).startswith(OPEN_PIPES)
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_open_pipe):  # a device or another pipe may never end
            raise BadInput(f"{name}: expected a file, got {KINDS.get(stat.S_IFMT(mode), 'a device')}")
        with open(path, "rb") as file:
            # `read` reserves memory for all bytes that it may return. A pipe, and a file of /proc, has the size 0.
            data = file.read(min(limit, info.st_size or limit) + 1)
    except FileNotFoundError:
        raise BadInput(f"{name}: no such file") from None
    except OSError as error:
        raise BadInput(f"{name}: cannot be read: {error.strerror or error}") from None
    except BadInput:
        raise
    except ValueError:
        raise BadInput(f"{name}: expected a file name, got unusable characters") from None
    return _checked_size(name, data, limit)


@lru_cache(maxsize=1)  # it can be read once, but a trace is read for every run of a command
def read_stdin() -> bytes:
    """Return standard input, unpacked if it is gzipped."""
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput(f"{STDIN_NAME}: expected a file or a pipe, got a terminal")
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{STDIN_NAME}: cannot be read: {error.strerror or error}") from None
    return _checked_size(STDIN_NAME, data, MAX_BYTES)


def read_text(path: PathLike, limit: int = MAX_BYTES) -> str:
    """Return the text of a file, unpacked if it is gzipped; raise BadInput if it cannot be read."""
    return decode_text(show_path(path), read_bytes(path, limit))


def decode_text(name: str, data: bytes) -> str:
    """Return the text of a file's content."""
    if b"\0" in data:
        raise BadInput(f"{name}: row {_row_number(data, data.index(0))}: expected text, got binary data")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: row {_row_number(data, error.start)}: expected UTF-8 text, got binary data") from None
    if not text or text.isspace():
        raise BadInput(f"{name}: row 1: the file is empty")
    return text


def read_json(path: PathLike) -> Any:
    """Return the value of a JSON file."""
    text = read_text(path)
    unusual = UNUSUAL_NUMBER.search(text)  # checking every number would be slow
    return parse_json(path, text, check_numbers=bool(unusual))


def parse_json(
    path: PathLike,
    text: str,
    row: int = 1,
    check_numbers: bool = False,
    constant: Optional[Callable[[str], Any]] = None,
) -> Any:
    """Parse a JSON text; the error names the row.

    `check_numbers` refuses numbers that a float cannot hold. `constant` converts NaN and Infinity, which are refused
    without it.
    """
    hooks: dict[str, Any] = {"parse_int": parse_integer, "parse_float": _parse_float} if check_numbers else {}
    try:
        value = json.loads(text, parse_constant=constant or _reject_constant, **hooks)
        if "\\ud" in text or "\\uD" in text:
            check_unicode(value)
        return value
    except json.JSONDecodeError as error:
        position = f"row {row + error.lineno - 1}, column {error.colno}"
        got = quote(text[error.pos : error.pos + 60])
        raise BadInput(f"{show_path(path)}: {position}: expected JSON, got {got}") from None
    except RecursionError:
        raise BadInput(f"{show_path(path)}: row {row}: expected JSON with fewer levels") from None
    except ValueError as error:
        raise BadInput(f"{show_path(path)}: row {row}: expected JSON: {str(error)[:80]}") from None


class _Quote(reprlib.Repr):
    """Return the `repr` of a value; of a large one only its beginning, which all messages cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 4, MAX_QUOTE // 3, MAX_QUOTE // 3, MAX_QUOTE // 3
        self.maxstring = self.maxother = 2 * MAX_QUOTE

    def repr_int(self, value: int, level: int) -> str:
        return "a huge int" if value.bit_length() > 256 else repr(value)

    def repr_instance(self, value: Any, level: int) -> str:
        try:
            return " ".join(repr(value).split()) or "''"
        except (ValueError, RecursionError):
            return f"a huge {type(value).__name__}"


def quote(value: Any) -> str:
    """Return a value for an error message: one line, at most 48 characters, also for a value that is huge."""
    text = _Quote().repr(value)
    return text if len(text) <= MAX_QUOTE else text[: MAX_QUOTE - 3] + "..."


def shorten(key: str) -> str:
    """Return a key for a message: one line, at most 48 characters."""
    return key if len(key) <= MAX_QUOTE and key.isprintable() else quote(key)


def show_path(path: PathLike) -> str:
    """Return a path for a message: one line, at most 200 characters."""
    text = os.fspath(path)
    return cut_middle(text if text.isprintable() else repr(text)[1:-1], 200)


def parse_integer(text: str) -> int:
    """Return an integer that a float can hold."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"expected at most {MAX_DIGITS} digits, got {len(text)}")
    return int(text)


def check_unicode(value: Any) -> None:
    """Raise ValueError if a text has half of a surrogate pair, which no file can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):x}"
        raise ValueError(f"expected characters of Unicode, got {code}") from None


def _checked_size(name: str, data: bytes, limit: int) -> bytes:
    """Return the content of a file, unpacked if it is gzipped."""
    if data[:2] == b"\x1f\x8b":
        data = _unpack(name, data, min(limit, max(SMALL_BYTES, MAX_RATIO * len(data))))
    if len(data) > limit:
        raise BadInput(f"{name}: expected at most {_size(limit)}, got more")
    return data


def _unpack(name: str, data: bytes, limit: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            text = file.read(limit + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise BadInput(f"{name}: row 1: damaged gzip file: {error}") from None
    if len(text) > limit:
        raise BadInput(f"{name}: expected a gzip file that unpacks to at most {_size(limit)}, got more")
    return text


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 2**20 else f"{count >> 10} KiB"


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{quote(text)} is too large")
    return value


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _row_number(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1


def check_keys(terms: Iterable[Any], known: Sequence[str], where: str) -> None:
    """Raise BadInput for an unknown key."""
    for key in terms:
        if key not in known:
            raise BadInput(f"{where}.{str(key)[:40]}: unknown key; known: {', '.join(known)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or an empty string if no known word is similar."""
    names = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {names[matches[0]]}?" if matches else ""
