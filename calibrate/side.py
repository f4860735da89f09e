"""One side of a comparison, simulated or measured: figures, requests and decisions, from a run or from its folder."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ..core import BadInput, Request
from ..metrics import COLUMNS, row
from ..scenario import Scenario, scenario_from
from ..simulate import Run
from .outcome import DECISIONS, SENT, STEPS, read_calls, read_sent


@dataclass
class Side:
    """What a run amounted to."""

    result: Mapping[str, Any]
    requests: Mapping[str, Mapping[str, Any]]  # by id: a row of requests.csv
    decisions: Optional[Sequence[Mapping[str, Any]]] = None
    scenario: Optional[Scenario] = None
    sent: Optional[Sequence[Request]] = None  # what it takes to simulate it again
    calls: Sequence[Sequence[float]] = field(default_factory=list)  # measured, as outcome.STEP_COLUMNS
    name: str = ""


def side_of(run: Run, decisions: Optional[Sequence[Mapping[str, Any]]] = None) -> Side:
    """Return a run as a side."""
    rows = {str(r.id): dict(zip(COLUMNS, row(r))) for r in run.requests}
    return Side(run.result(), rows, decisions, run.scenario, run.requests, getattr(run, "model_calls", ()))


def read_side(folder: Path) -> Side:
    """Read a side from the folder that `sim run -o`, `sim replay -o` wrote."""
    for name in ("result.json", "requests.csv", "manifest.json"):
        if not (folder / name).is_file():
            raise BadInput(f"{folder}: expected a folder of `sim run -o` or `sim replay -o`; it has no {name}")
    manifest = read_json(folder / "manifest.json")
    sent, steps, log = folder / SENT, folder / STEPS, folder / DECISIONS
    return Side(
        read_json(folder / "result.json"),
        read_requests(folder / "requests.csv"),
        read_decisions(log) if log.is_file() else None,
        scenario_from(manifest["scenario"], str(folder / "manifest.json")),
        read_sent(sent) if sent.is_file() else None,
        read_calls(steps) if steps.is_file() else [],
        folder.name,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
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
    """Return a cell of requests.csv as what it is."""
    if key in ("id", "outcome"):
        return text or None
    if not text:
        return None
    return int(text) if key in ("prompt", "output", "evictions") else float(text)


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """Read a decision log."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
