"""What came of a live run: the files of `sim run`, and beside them what was sent, decided and measured call by call."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core import BadInput, Request, Shape, Stuck
from ..metrics import Measures, lose
from ..profile import Profile
from ..results import open_text, write_run
from ..scenario import Scenario
from ..simulate import Run, build
from .live import REQUEST, TIMES

DECISIONS = "decisions.jsonl.gz"
STEPS = "steps.csv"
SENT = "sent.jsonl"
STEP_COLUMNS = ("start", "called", "end", *Shape._fields)


@dataclass
class LiveRun(Run):
    """A run that was measured instead of simulated."""

    backend: Mapping[str, Any] = field(default_factory=dict)  # what ran it
    model_calls: Sequence[Sequence[Any]] = ()  # STEP_COLUMNS of each
    decisions: Sequence[Mapping[str, Any]] = ()
    host: Sequence[float] = ()  # what the host adds, from the warm-up: the fields of host.Host
    stopped: bool = False  # before all was served
    extra: Mapping[str, Any] = field(default_factory=dict)  # what else was seen

    def result(self) -> dict[str, Any]:
        """Return the figures of a run, then what only a measurement knows."""
        calls = self.model_calls
        return {
            **super().result(),
            "backend": dict(self.backend),
            "host_s": sum(call[1] - call[0] for call in calls),
            "device_s": sum(call[2] - call[1] for call in calls),
            "host": list(self.host),
            "stopped": self.stopped,
            **self.extra,
        }


def live_run(scenario: Scenario, profile: Profile, requests: Sequence[Request], told: Mapping[str, Any]) -> LiveRun:
    """Return the run that the live driver told of, the requests filled in."""
    for request, (written, arrival, *times) in zip(requests, told["requests"]):
        request._written, request.arrival = written, arrival
        for name, value in zip(TIMES, times):
            setattr(request, name, value)
    server = build(scenario, ()).server
    server.computed = told["computed"]
    for seconds, seen in zip(*told["gaps"]):
        server.gaps.add(seconds, seen)
    if scenario.engine.lost_after is not None:
        lose(requests, scenario.engine.lost_after)
    calls = told["calls"]
    stuck = Stuck(told["stuck"], [], told["end"]) if told["stuck"] else None
    return LiveRun(
        scenario=scenario,
        profile=profile,
        requests=requests,
        measures=Measures(requests, server.gaps, scenario.slo.seconds()),
        server=server,
        calls=len(calls),
        busy=sum(call[2] - call[0] for call in calls),
        end=told["end"],
        padded_tokens=0,
        padded_rows=0,
        stuck=stuck,
        backend=told["backend"],
        model_calls=calls,
        decisions=told["decisions"],
        host=told["host"],
        stopped=told["stopped"],
        extra={"late_s": told["late"], "blocks_left": told["blocks_left"], "blocks": told["blocks"]},
    )


def write_live(run: LiveRun, folder: Path) -> None:
    """Write a live run's files."""
    write_run(run, folder)
    write_sent(run.requests, folder / SENT)
    if run.decisions:
        write_decisions(run.decisions, folder / DECISIONS)
    if run.model_calls:
        with open_text(folder / STEPS) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("step", *STEP_COLUMNS))
            writer.writerows((number, *call) for number, call in enumerate(run.model_calls))


def write_decisions(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a decision log."""
    with open_text(path) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def write_sent(requests: Sequence[Request], path: Path) -> None:
    """Write the requests as they were sent, enough to send or simulate them again."""
    with open_text(path) as file:
        for request in requests:
            row = {name: getattr(request, name) for name in REQUEST}
            file.write(json.dumps({**row, "prefix": list(request.prefix)}) + "\n")


def read_sent(path: Path) -> list[Request]:
    """Return the requests of a SENT file, fresh."""
    with path.open(encoding="utf-8") as lines:
        return [Request(**json.loads(line)) for line in lines]


def read_calls(path: Path) -> list[list[float]]:
    """Return the measured calls of a STEPS file."""
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        if header != ["step", *STEP_COLUMNS]:
            raise BadInput(f"{path}:1: expected the columns step, {', '.join(STEP_COLUMNS)}")
        return [[*map(float, row[1:4]), *map(int, row[4:])] for row in reader]
