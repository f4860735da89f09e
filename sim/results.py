"""The files of a run: manifest.json, result.json, requests.csv; whole or not at all."""

from __future__ import annotations

import csv
import gzip
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, Union

from . import __version__
from .core import BadInput
from .metrics import COLUMNS, row

if TYPE_CHECKING:
    from .simulate import Run


@contextmanager
def open_text(path: Union[str, Path]) -> Iterator[TextIO]:
    """Open a text file to be written, compressed if its name says so; it appears only once it is complete."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":  # no time stamp inside, so that equal runs give equal bytes
            raw = open(part, "wb")  # noqa: SIM115
            packed = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
            import io

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
    """Write JSON for people and programs."""
    with open_text(path) as file:
        json.dump(value, file, indent=1, default=str)
        file.write("\n")


def write_run(run: Run, folder: Union[str, Path]) -> None:
    """Write a run's three files."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: expected a folder to write to, found a file")
    write_requests(folder / "requests.csv", run.requests)
    write_json(folder / "result.json", run.result())
    write_json(folder / "manifest.json", manifest(run))


def write_requests(path: Path, requests: Any) -> None:
    """Write one row a request, in the order they were sent."""
    with open_text(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row(request) for request in requests)


def manifest(run: Run) -> dict[str, Any]:
    """Return what it takes to run it again."""
    import numpy
    import simpy

    return {
        "scenario": run.scenario.model_dump(mode="json"),
        "seed": run.scenario.seed,
        "profile": {"name": run.profile.name, "digest": run.profile.digest},
        "versions": {
            "servesim": __version__,
            "python": platform.python_version(),
            "simpy": getattr(simpy, "__version__", "?"),
            "numpy": numpy.__version__,
        },
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
