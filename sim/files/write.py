"""Write files. A file appears only when it is complete."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, Union

from servesim.core import BadInput


@contextmanager
def open_text(path: Union[str, Path]) -> Iterator[TextIO]:
    """Open a text file for writing, gzipped if its name ends in .gz; it appears only when it is complete."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":  # no time stamp, so that equal runs give equal bytes
            raw = open(part, "wb")  # noqa: SIM115
            packed = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
            file: TextIO = io.TextIOWrapper(packed, encoding="utf-8", newline="")
        else:
            raw = None
            file = open(part, "w", encoding="utf-8", newline="")  # noqa: SIM115
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
    try:
        yield file
    except BaseException:
        file.close()
        part.unlink(missing_ok=True)
        raise
    file.close()
    if raw is not None:
        raw.close()
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    with open_text(path) as file:
        json.dump(value, file, indent=1, default=str)
        file.write("\n")
