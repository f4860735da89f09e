"""The folder of a run: writes and reads its files. Each value is validated, because a user can edit or damage a file.

Every run has manifest.json, result.json and requests.csv. A replay adds decisions.jsonl.gz; its live side also has
sent.jsonl (the requests as sent), steps.csv (the measured model calls), timeline.json.gz, and device.csv (counters of
the device, if a tool sampled them).
"""

from __future__ import annotations

import json
import math
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import numpy as np
from pydantic import Field, field_validator
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import use_access
from servesim.core import BadInput, Request
from servesim.core.content import content_of_pieces
from servesim.core.limits import MAX_INT, MAX_RESULT
from servesim.core.request import CLIENT_FIELDS
from servesim.files.checked import Index, Stored, StoredNumber, validate
from servesim.files.csv_columns import write_columns
from servesim.files.csv_rows import CsvRow, read_csv
from servesim.files.read import parse_json, quote, read_json, read_text
from servesim.files.step_table import ModelCall, read_calls
from servesim.files.write import open_text, write_json, write_rows
from servesim.version import __version__

from .metric_table import METRICS
from .metrics import percentile, time_per_token
from .replicas import DRAFTS, REPLICA, request_table
from .request_rows import RECORDED
from .simulate import Run

METRIC_KEYS = (*METRICS, "total_input_tokens", "total_output_tokens")  # of result.json: numbers, or null
Tokens = Annotated[int, Field(ge=0, le=MAX_INT)]
Seconds = Annotated[float, Field(ge=0, le=MAX_RESULT)]
Id = Union[str, int]
# Of a content: the name of a text, and tokens. JSON has lists, not tuples.
Piece = Annotated[tuple[Id, Annotated[int, Field(gt=0, le=MAX_INT)]], Field(strict=False)]


class ManifestFile(Stored):
    """The key of manifest.json that is read back."""

    scenario: dict[str, Any]


class IntervalKeys(Stored):
    """The intervals of a run's metrics."""

    draws: Index
    confidence: Annotated[float, Field(gt=0, lt=1)]
    metrics: dict[str, Annotated[list[StoredNumber], Field(min_length=2, max_length=2)]]


class ReplicaKeys(Stored):
    """The metrics of one replica."""

    name: str
    requests: Index
    output_throughput: StoredNumber
    mean_ttft_ms: Optional[StoredNumber] = None
    prefix_hit_rate: Optional[StoredNumber] = None
    busy: StoredNumber
    peak_kv_usage: Optional[StoredNumber] = None
    preemptions: Index


class ResultFile(Stored):
    """The keys of result.json besides the metrics."""

    outcomes: dict[str, Index] = Field({})
    mean_seconds: dict[str, StoredNumber] = Field({})
    host: list[Seconds] = Field([], max_length=4)  # the fields of costs.parts.HostPart
    intervals: Optional[IntervalKeys] = None
    server_latencies: dict[str, StoredNumber] = Field({})  # by metric, measured in the server
    replicas: list[ReplicaKeys] = Field([])  # of a fleet


class SentLine(Stored):
    """One line of sent.jsonl: the arguments of a request."""

    id: Id
    arrival: Seconds
    prompt: Tokens
    output: Tokens
    limit: Optional[Tokens] = None
    priority: int = Field(0, ge=-MAX_INT, le=MAX_INT)
    session: Optional[Id] = None
    content: Optional[Annotated[list[Piece], Field(min_length=1)]] = None  # None: a text of its own
    answer: Optional[Id] = None  # name of the answer, with content only
    follows: Optional[Id] = None
    think_time: Seconds = 0.0
    fails_at_token: Optional[Tokens] = None
    acceptance: Optional[Annotated[float, Field(ge=0, le=1)]] = None


class DecisionLine(Stored):
    """The keys of one line of the decision log that are read back."""

    t: StoredNumber
    t_end: StoredNumber
    kind: str
    free: Optional[int]
    chunks: list[Annotated[list[Any], Field(min_length=2, max_length=2)]]
    prompts: list[Any]
    admitted: list[Any]
    preempted: list[Any]
    swapped_in: list[Any]
    rejected: list[Any]
    waiting: list[Any]
    running: list[Any]
    swapped: list[Any]
    finished: list[Any]

    @field_validator("chunks")
    @classmethod
    def _check_tokens(cls, chunks: list[list[Any]]) -> list[list[Any]]:
        if any(type(tokens) is not int for _, tokens in chunks):
            raise ValueError("pairs of a request and its tokens")
        return chunks


def read_result(path: Path) -> dict[str, Any]:
    """Read result.json; its metrics are numbers or null."""
    result = read_json(path)
    validate(ResultFile, result, str(path))
    for key in (*METRIC_KEYS, *(key for key in result if "[" in key)):  # the latter: of one priority or session
        value = result.get(key)
        if value is not None and (type(value) not in (int, float) or not abs(value) <= MAX_RESULT):
            raise BadInput(f"{path}: {key}: expected a number or null, got {quote(value)}")
    return dict(result)


def read_requests(path: Path) -> dict[str, dict[str, Any]]:
    """Read requests.csv; empty times are None."""
    rows: dict[str, dict[str, Any]] = {}
    for cells in read_csv(path, RECORDED):
        row = {key: parse_cell(cells, key) for key in RECORDED}
        if REPLICA in cells.cells:
            row[REPLICA] = cells[REPLICA] or None
        row.update({key: cells.whole(key) if cells[key] else None for key in DRAFTS if key in cells.cells})
        finished = row["outcome"] == "finished"
        needed = ("id", "arrival", "prompt", "output", *(("first_token", "finish") if finished else ()))
        missing = [key for key in needed if row[key] is None]
        if missing:
            raise BadInput(f"{cells.where}: {missing[0]}: expected a value, got an empty cell")
        if row["id"] in rows:
            raise BadInput(f"{cells.where}: id: expected every id once, got {quote(row['id'])} twice")
        rows[row["id"]] = row
    return rows


def parse_cell(row: CsvRow, key: str) -> Any:
    """Return a cell of requests.csv as text, int, float or None."""
    if not row[key] or key in ("id", "session", "outcome"):
        return row[key] or None
    if key == "priority":
        return int(row.number(key, -MAX_INT, MAX_INT))
    return row.whole(key) if key in ("prompt", "output", "preemptions", "cached_tokens") else row.number(key)


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the position and the value of each line of JSON."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        yield f"{path}:{number}", parse_json(path, line, number)


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a decision log."""
    lines = list(read_lines(path))
    for where, line in lines:
        validate(DecisionLine, line, where)
    return [line for _, line in lines]


def read_sent(path: Path) -> list[Request]:
    """Return the requests of sent.jsonl, in their state before the run."""
    requests, ids = [], set()
    for where, line in read_lines(path):
        sent = validate(SentLine, line, where)
        if sent.id in ids:
            raise BadInput(f"{where}: id: expected every id once, got {quote(sent.id)} twice")
        ids.add(sent.id)
        fields = {key: getattr(sent, key) for key in CLIENT_FIELDS if key != "sampling"}  # they have one answer
        if sent.content is not None:
            fields["content"] = content = content_of_pieces(sent.content, sent.answer)
            if content.ends[-1] != sent.prompt:
                raise BadInput(
                    f"{where}: content: expected {sent.prompt} tokens, as the prompt, got {content.ends[-1]}"
                )
        requests.append(Request(**fields))
    return requests


MANIFEST, RESULT, REQUESTS = "manifest.json", "result.json", "requests.csv"
DECISIONS, SENT, STEPS = "decisions.jsonl.gz", "sent.jsonl", "steps.csv"
SERVER_LOG = "decisions.jsonl"  # of an adapter, which writes line by line
TIMELINE, DEVICE = "timeline.json.gz", "device.csv"
PERCENTILE_NAME = re.compile(r"p(\d+(?:\.\d+)?)_(ttft|tpot|e2el)_ms")


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

    def metric(self, name: str) -> Optional[float]:
        """Return a metric; a percentile that was not stored comes from the requests. None if there is no value."""
        value = self.result.get(name)
        if value is None:
            value = request_percentile(name, self.requests.values())
        return None if value is None or (isinstance(value, float) and math.isnan(value)) else float(value)


def request_percentile(name: str, rows: Iterable[Mapping[str, Any]]) -> Optional[float]:
    """Return a percentile such as p99.9_ttft_ms of the finished requests; None for every other metric."""
    match = PERCENTILE_NAME.fullmatch(name)
    latencies = latencies_of([row for row in rows if row["outcome"] == "finished"]) if match else {}
    values = latencies.get(match[2], []) if match else []
    return percentile(sorted(values), float(match[1])) if match and len(values) else None


def latencies_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return TTFT, TPOT and E2E latency of finished requests, in milliseconds; one token has no TPOT."""
    sent, first, end, output = (
        np.array([float(row[column]) for row in rows]) for column in ("arrival", "first_token", "finish", "output")
    )
    ttft, e2el = 1e3 * (first - sent), 1e3 * (end - sent)
    tpot = time_per_token(ttft, e2el, output)[output > 1]
    return {"ttft": ttft.tolist(), "tpot": tpot.tolist(), "e2el": e2el.tolist()}


def run_data(run: Run, decisions: Optional[Sequence[Mapping[str, Any]]] = None) -> RunData:
    """Return a run of this process in the form of its folder."""
    names, parts = request_table(run.requests, run.replicas, run.counts_drafts)
    rows = {str(row[0]): dict(zip(names, row)) for part in parts for row in zip(*part)}
    return RunData(run.result(), rows, decisions, run.scenario, run.requests, getattr(run, "model_calls", ()))


def write_run(run: Run, folder: Union[str, Path], settings: Optional[Mapping[str, Any]] = None) -> None:
    """Write manifest.json, result.json and requests.csv of a run; `settings` are further keys of the manifest."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: expected a folder, found a file")
    with open_text(folder / REQUESTS) as file:
        names, parts = request_table(run.requests, run.replicas, run.counts_drafts)
        write_rows(file, [names])
        for part in parts:
            write_columns(file, part)
    write_json(folder / RESULT, run.result())
    write_json(folder / MANIFEST, {**manifest(run), **(settings or {})})


def manifest(run: Run) -> dict[str, Any]:
    """Return the content of manifest.json: everything needed to repeat the run."""
    import numpy
    import simpy

    return {
        "scenario": run.scenario.model_dump(mode="json"),
        "seed": run.scenario.seed,
        "profiles": [{"name": profile.name, "digest": profile.digest} for profile in run.profiles],
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
            fields = dict(zip(CLIENT_FIELDS, request.client_fields()))
            del fields["sampling"]
            if fields["acceptance"] is None:
                del fields["acceptance"]
            if request.content is not None:
                fields |= {"content": request.content.pieces, "answer": request.content.answer}
            file.write(json.dumps(fields) + "\n")


def read_run(folder: Path) -> RunData:
    """Read a folder of `sim run -o` or `sim replay -o`."""
    for name in (RESULT, REQUESTS, MANIFEST):
        if not (folder / name).exists():
            raise BadInput(f"{folder}: expected a folder of `sim run -o` or `sim replay -o`; it has no {name}")
    sent, steps = folder / SENT, folder / STEPS
    log = folder / (SERVER_LOG if (folder / SERVER_LOG).exists() else DECISIONS)
    return RunData(
        read_result(folder / RESULT),
        read_requests(folder / REQUESTS),
        read_decisions(log) if log.exists() else None,
        read_scenario(read_manifest(folder), str(folder / MANIFEST)),
        read_sent(sent) if sent.exists() else None,
        read_calls(steps) if steps.exists() else [],
        folder.name,
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the scenario of a run folder, as a mapping."""
    return validate(ManifestFile, read_json(folder / MANIFEST), str(folder / MANIFEST)).scenario


def read_scenario(tree: Mapping[str, Any], where: str) -> Scenario:
    """Return the scenario of a manifest. Reading a folder executes nothing, so a policy file is not loaded."""
    with use_access(None):
        return scenario_from(tree, where)
