"""Sizes in bytes: read `141GB` or `40GiB`, and print them."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, Field

from .checked import expected_error

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{0,18})?(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*)\s*")
MAX_BYTES = 10**18
EXPECTED = "a size above 0, such as 141GB or 40GiB"


def to_bytes(value: Any) -> Any:
    """Return a size as a number of bytes; raise an error for other values."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    match = SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in UNITS:
        raise expected_error(EXPECTED)
    size = float(match[1]) * UNITS[match[2].upper()]
    if not (math.isfinite(size) and 1 <= size <= MAX_BYTES):
        raise expected_error(f"{EXPECTED}, at most {MAX_BYTES:g} bytes")
    return int(size)


ByteSize = Annotated[int, BeforeValidator(to_bytes, json_schema_input_type=Union[int, str]), Field(gt=0)]


def format_bytes(size: float) -> str:
    """Return a size with a decimal unit and three digits or more, e.g. 13.5 GB."""
    unit, name = next(((UNITS[name], name) for name in ("TB", "GB", "MB", "KB") if size >= UNITS[name]), (1, "bytes"))
    number = size / unit
    return f"{number:,.{max(0, 2 - int(math.log10(number)))}f} {name}" if number >= 1 else f"{number:g} {name}"
