"""The folder of a run: writes its files, and reads it as a whole (run_files.py reads each file).

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from servesim import __version__
from servesim.config.old_keys import OLD, rename_keys
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import use_access
from servesim.core import BadInput, Request
from servesim.engine.step import ModelCall
from servesim.files.checked import validate
from servesim.files.read import read_json
from servesim.files.write import csv_writer, open_text, write_json

from .metrics import percentile, time_per_token
from .request_rows import COLUMNS, row
from .run_files import (
    SENT_KEYS,
    STEP_COLUMNS,
    ManifestFile,
    read_decisions,
    read_requests,
    read_result,
    read_sent,
    read_steps,
)
from .simulate import Run

MANIFEST, RESULT, REQUESTS = "manifest.json", "result.json", "requests.csv"
DECISIONS, SENT, STEPS = "decisions.jsonl.gz", "sent.jsonl", "steps.csv"
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
    rows = {str(r.id): dict(zip(COLUMNS, row(r))) for r in run.requests}
    return RunData(run.result(), rows, decisions, run.scenario, run.requests, getattr(run, "model_calls", ()))


def write_run(run: Run, folder: Union[str, Path], settings: Optional[Mapping[str, Any]] = None) -> None:
    """Write manifest.json, result.json and requests.csv of a run; `settings` are further keys of the manifest."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: expected a folder, found a file")
    with open_text(folder / REQUESTS) as file:
        writer = csv_writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(row(request) for request in run.requests)
    write_json(folder / RESULT, run.result())
    write_json(folder / MANIFEST, {**manifest(run), **(settings or {})})


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
        writer = csv_writer(file)
        writer.writerow(("step", *STEP_COLUMNS))
        writer.writerows((number, *call.flat()) for number, call in enumerate(calls))


def read_run(folder: Path) -> RunData:
    """Read a folder of `sim run -o` or `sim replay -o`."""
    for name in (RESULT, REQUESTS, MANIFEST):
        if not (folder / name).exists():
            raise BadInput(f"{folder}: expected a folder of `sim run -o` or `sim replay -o`; it has no {name}")
    manifest = validate(ManifestFile, read_json(folder / MANIFEST), str(folder / MANIFEST))
    sent, steps, log = folder / SENT, folder / STEPS, folder / DECISIONS
    return RunData(
        read_result(folder / RESULT),
        read_requests(folder / REQUESTS),
        read_decisions(log) if log.exists() else None,
        read_scenario(manifest.scenario, str(folder / MANIFEST)),
        read_sent(sent) if sent.exists() else None,
        read_steps(steps) if steps.exists() else [],
        folder.name,
    )


def read_scenario(tree: Mapping[str, Any], where: str) -> Scenario:
    """Return the scenario of a manifest. Reading a folder executes nothing, so a policy file is not loaded."""
    with use_access(None):
        return scenario_from(tree, where)
