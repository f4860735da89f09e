"""One session of h200_replay.py on the device: live runs, with slices of the calibration between them.

Step times drift by a few percent within minutes: the GPU clock follows the load, the host speed follows other users. So
the profile is measured throughout the session, not only before it. It contains no step of a run that is compared.
"""

from __future__ import annotations

import argparse
import csv
import gc
import gzip
import io
import json
import tarfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from replay_settings import (
    BLOCK,
    CALIBRATION_SETTINGS,
    MANY_ROWS,
    MANY_SETTINGS,
    SETTINGS,
    draw_contents,
    draw_requests,
    engine,
    offered_load,
    runs,
)

ARCHIVE = "h200_replay.tar.gz"
WARM_UP = 48  # requests
FIRST_SERVED_POINT = 100_000  # point numbers from here on are served steps, not probe points
HOST_BLOCKS = 256  # swap space of the probe
GRID = {"max_tokens": 4096, "max_seq_len": 2048}


class Recorder:
    """Collects the files of a session in one archive, which is complete after every run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / ARCHIVE
        self.files: dict[str, bytes] = {}

    def put(self, name: str, data: Any) -> None:
        """Add or replace a file."""
        text = data if isinstance(data, str) else json.dumps(data, default=str)
        self.files[name] = gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode()

    def write(self) -> None:
        """Rewrite the archive."""
        temporary = self.path.with_suffix(".part")
        with tarfile.open(temporary, "w:gz", compresslevel=1) as archive:
            for name, packed in self.files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(packed)
                archive.addfile(entry, io.BytesIO(packed))
        temporary.replace(self.path)


class ReplaySession:
    """A loaded backend and the samples measured on it."""

    def __init__(self, backend: Any, model: Any, args: argparse.Namespace) -> None:
        from servesim.calibrate.probe.measure import Probe

        self.backend, self.model, self.args = backend, model, args
        rows = getattr(args, "rows", 128)
        self.calibration = (
            ("many-calibration", MANY_SETTINGS[:1]) if rows > 128 else ("calibration", CALIBRATION_SETTINGS)
        )
        self.batch, self.warm_up = rows, WARM_UP if rows <= 128 else rows
        options = {**GRID, "max_rows": rows, "rounds": 1, "precision": 0.0, "budget": 1e9}
        self.probe = Probe(backend, options, lambda _: None)
        self.served: list[dict[str, Any]] = []  # steps of the calibration workloads
        self.hosts: list[Any] = []
        self.slices = 0

    def calibrate_slice(self) -> None:
        """Add one slice of samples: one round of probe points, and the steps of one served calibration workload."""
        gc.collect()
        gc.disable()
        self.probe.run()
        gc.enable()
        if not self.args.no_in_situ:
            settings = self.calibration[1]
            self._serve(settings[self.slices % len(settings)], self.slices)
        self.slices += 1

    def _serve(self, setting: str, slice_index: int) -> None:
        from servesim.calibrate.probe.host_overhead import overhead_samples
        from servesim.files.step_table import model_call

        workload = self.calibration[0]
        rows = self.run(setting, workload, self.requests(workload, slice_index), 0)["told"]["calls"]
        calls = [model_call(row) for row in rows]
        self.hosts += overhead_samples(calls)
        for call in calls:
            point = FIRST_SERVED_POINT + len(self.served)  # one point per step
            seconds = call.end - call.called
            self.served.append({"kind": call.shape.kind, **call.shape._asdict(), "seconds": seconds, "point": point})

    def samples(self) -> str:
        """Return all samples so far as the text of samples.csv."""
        from servesim.calibrate.probe.measure import COLUMNS

        self.probe.flag()
        file = io.StringIO()
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*self.probe.rows, *self.served])
        return file.getvalue()

    def run(
        self, setting: str, workload: str, requests: list[list[Any]], warm_up: Optional[int] = None
    ) -> dict[str, Any]:
        """Run one setting live; return its arguments and its result (key `told`, part of the archive format)."""
        from servesim.calibrate.live.replay_job import replay

        args = {
            "policy": SETTINGS[setting]["policy"],
            "engine": engine(setting, workload, self.args.blocks),
            "requests": requests,
            "seed": 0,
            "vocab": self.model.vocab,
            "context": self.model.context,
            "warm_up": self.warm_up if warm_up is None else warm_up,
        }
        return {"setting": setting, "workload": workload, "args": args, "told": replay(self.backend, args)}

    def requests(self, workload: str, slice_index: int = 0, setting: str = "stock") -> list[list[Any]]:
        """Return the requests of a workload, with arrivals scaled to its load on this device."""
        rows = draw_contents(workload, draw_requests(workload, slice_index)[: self.args.limit])
        prompt = sum(row[2] for row in rows) / len(rows)
        output = sum(row[3] for row in rows) / len(rows)
        batch = min(self.batch, self.args.blocks * BLOCK // int(prompt + output))
        decode = self._time_step(batch, 1, int(prompt + output / 2)) / batch
        seconds = self._time_step(1, int(prompt), 0) + output * decode
        scale = seconds / offered_load(workload, slice_index, setting)  # seconds per request
        return [[id, arrival * scale, *rest] for id, arrival, *rest in rows]

    def _time_step(self, rows: int, tokens: int, context: int) -> float:
        """Return the median seconds of a step."""
        from servesim.calibrate.device.backend import Row

        per_row, blocks = -(-(tokens + context) // BLOCK), self.args.blocks
        tables = [[1 + (row * per_row + index) % blocks for index in range(per_row)] for row in range(rows)]
        batch = [Row([7] * tokens, context, table) for table in tables]
        seconds = []
        for _ in range(9):
            start = time.perf_counter()
            self.backend.step(batch)
            self.backend.synchronize()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)[len(seconds) // 2]


def measure(args: argparse.Namespace) -> int:
    """Run every setting live, with calibration slices between the runs, and record everything."""
    from servesim.calibrate.device.torch.backend import ROW_BUCKETS, TorchBackend
    from servesim.costs.public_models import PUBLIC_MODELS

    start = time.perf_counter()
    model = PUBLIC_MODELS[args.model]
    backend = TorchBackend(args.device, row_buckets=[*ROW_BUCKETS, *(rows for rows in MANY_ROWS if rows <= args.rows)])
    backend.load(model, args.blocks + 1, BLOCK, HOST_BLOCKS)
    recorder = Recorder(Path(args.out))
    about = {**backend.describe(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    recorder.put("about.json", about)
    print_progress(start, f"loaded {args.model}")
    session = ReplaySession(backend, model, args)
    workload, settings = session.calibration
    session.run(settings[0], workload, session.requests(workload))  # warms up the GPU; the result is discarded
    todo = runs(args.workloads, args.settings)
    requests: dict[Any, list[list[Any]]] = {}  # settings with the same load have the same requests
    for workload, setting, _ in todo:
        if (workload, offered_load(workload, 0, setting)) not in requests:
            requests[workload, offered_load(workload, 0, setting)] = session.requests(workload, 0, setting)
    for index, (workload, setting, again) in enumerate(todo):
        while session.slices * len(todo) <= index * (args.slices - 1):
            session.calibrate_slice()
        result = session.run(setting, workload, requests[workload, offered_load(workload, 0, setting)])
        recorder.put(f"{'again/' if again else ''}{workload}/{setting}.json.gz", result)
        save(recorder, session)
        end, calls = result["told"]["end"], len(result["told"]["calls"])
        print_progress(start, f"{workload} {setting}: {end:.1f} s, {calls} model calls")
    session.calibrate_slice()
    save(recorder, session)
    counts = f"{len(session.probe.rows)} probe samples, {len(session.served)} served steps, {session.slices} slices"
    print_progress(start, counts)
    return 0


def save(recorder: Recorder, session: ReplaySession) -> None:
    """Write all results so far, so that an interrupted session can still be used."""
    recorder.put("samples.csv", session.samples())
    recorder.put("hosts.json", session.hosts)
    recorder.write()


def print_progress(start: float, message: str) -> None:
    """Print a message with the seconds since the start."""
    print(f"{time.perf_counter() - start:7.1f} s  {message}", flush=True)
