"""The folder of a run: writes and reads all of its files.

Every run has manifest.json, result.json and requests.csv. A replay adds decisions.jsonl.gz; its live side also has
sent.jsonl (the requests as sent) and steps.csv (the measured model calls).
"""

from __future__ import annotations

import csv
import gzip
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

from servesim import __version__
from servesim.config.old_keys import OLD, rename_keys
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Request, Shape
from servesim.core.old_names import REQUEST_FIELDS
from servesim.core.request import CLIENT_FIELDS
from servesim.engine.step import ModelCall, model_call
from servesim.files.write import open_text, write_json

from .metrics import COLUMNS, row
from .simulate import Run

MANIFEST, RESULT, REQUESTS = "manifest.json", "result.json", "requests.csv"
DECISIONS, SENT, STEPS = "decisions.jsonl.gz", "sent.jsonl", "steps.csv"
STEP_COLUMNS = ("start", "called", "end", *Shape._fields)
OLD_KEYS = {new: old for old, new in REQUEST_FIELDS.items()}
SENT_KEYS = tuple(OLD_KEYS.get(name, name) for name in CLIENT_FIELDS)  # sent.jsonl keeps the keys of servesim 0.1


@dataclass
class RunData:
    """The content of a run folder, simulated or measured."""

    result: Mapping[str, Any]
    requests: Mapping[str, Mapping[str, Any]]  # id -> row of requests.csv
    decisions: Optional[Sequence[Mapping[str, Any]]] = None
    scenario: Optional[Scenario] = None
    sent: Optional[Sequence[Request]] = None  # needed to simulate the run again
    calls: Sequence[ModelCall] = ()  # measured
    name: str = ""


def run_data(run: Run, decisions: Optional[Sequence[Mapping[str, Any]]] = None) -> RunData:
    """Return a run of this process in the form of its folder."""
    rows = {str(r.id): dict(zip(COLUMNS, row(r))) for r in run.requests}
    return RunData(run.result(), rows, decisions, run.scenario, run.requests, getattr(run, "model_calls", ()))


def write_run(run: Run, folder: Union[str, Path]) -> None:
    """Write manifest.json, result.json and requests.csv of a run."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: expected a folder, found a file")
    with open_text(folder / REQUESTS) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row(request) for request in run.requests)
    write_json(folder / RESULT, run.result())
    write_json(folder / MANIFEST, manifest(run))


def manifest(run: Run) -> dict[str, Any]:
    """Return the content of manifest.json: everything needed to repeat the run."""
    import numpy
    import simpy

    return {
        "scenario": rename_keys(run.scenario.model_dump(mode="json"), OLD),
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


def write_decisions(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    with open_text(path) as file:
        for line in rows:
            file.write(json.dumps(line) + "\n")


def write_sent(requests: Sequence[Request], path: Path) -> None:
    """Write the requests as sent, enough to send or simulate them again."""
    with open_text(path) as file:
        for request in requests:
            fields = dict(zip(SENT_KEYS, request.client_fields()))
            fields["prefix"] = list(request.prefix_hashes)
            file.write(json.dumps(fields) + "\n")


def write_steps(calls: Sequence[ModelCall], path: Path) -> None:
    with open_text(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", *STEP_COLUMNS))
        writer.writerows((number, *call.flat()) for number, call in enumerate(calls))


def read_run(folder: Path) -> RunData:
    """Read a folder of `sim run -o` or `sim replay -o`."""
    for name in (RESULT, REQUESTS, MANIFEST):
        if not (folder / name).is_file():
            raise BadInput(f"{folder}: expected a folder of `sim run -o` or `sim replay -o`; it has no {name}")
    manifest = read_json(folder / MANIFEST)
    sent, steps, log = folder / SENT, folder / STEPS, folder / DECISIONS
    return RunData(
        read_json(folder / RESULT),
        read_requests(folder / REQUESTS),
        read_decisions(log) if log.is_file() else None,
        scenario_from(manifest["scenario"], str(folder / MANIFEST)),
        read_sent(sent) if sent.is_file() else None,
        read_steps(steps) if steps.is_file() else [],
        folder.name,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: expected a mapping")
    return value


def read_requests(path: Path) -> dict[str, dict[str, Any]]:
    """Read requests.csv; empty times are None."""
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise BadInput(f"{path}:1: expected the columns {', '.join(COLUMNS)}")
        rows = {}
        for number, line in enumerate(reader, 2):
            try:
                rows[line["id"]] = {key: read_value(key, text) for key, text in line.items()}
            except ValueError as error:
                raise BadInput(f"{path}:{number}: {error}") from None
        return rows


def read_value(key: str, text: str) -> Any:
    """Return a cell of requests.csv as text, int, float or None."""
    if not text:
        return None
    if key in ("id", "outcome"):
        return text
    return int(text) if key in ("prompt", "output", "evictions") else float(text)


def read_decisions(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_sent(path: Path) -> list[Request]:
    """Return the requests of sent.jsonl, in their state before the run."""
    with path.open(encoding="utf-8") as lines:
        return [Request(**json.loads(line)) for line in lines]


def read_steps(path: Path) -> list[ModelCall]:
    """Return the measured calls of steps.csv."""
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.reader(lines)
        if next(reader, []) != ["step", *STEP_COLUMNS]:
            raise BadInput(f"{path}:1: expected the columns step, {', '.join(STEP_COLUMNS)}")
        return [model_call(row[1:]) for row in reader]
