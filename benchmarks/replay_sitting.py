"""One sitting of h200_replay.py on the device: replays, and between them slices of the calibration.

What a step takes drifts by a few per cent over minutes (the card's clock follows its load, the host's speed its
neighbours), so the profile is measured all through the sitting, not only before it. Nothing that is judged is in it.
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
from typing import Any

from replay_settings import BLOCK, CALIBRATED, SETTINGS, drawn, engine, load_of, runs

ARCHIVE = "h200_replay.tar.gz"
WARM_UP = 48  # requests
IN_SITU = 100_000  # the first point of steps that were not designed
HOST_BLOCKS = 256  # to swap to, in the probe
GRID = {"most_rows": 128, "most_tokens": 4096, "longest": 2048}


class Recorder:
    """Collects the files of a sitting and packs them, whole after every run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / ARCHIVE
        self.files: dict[str, bytes] = {}

    def put(self, name: str, data: Any) -> None:
        """Add a file, or replace it."""
        text = data if isinstance(data, str) else json.dumps(data, default=str)
        self.files[name] = gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode()

    def write(self) -> None:
        """Write the archive anew."""
        part = self.path.with_suffix(".part")
        with tarfile.open(part, "w:gz", compresslevel=1) as archive:
            for name, packed in self.files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(packed)
                archive.addfile(entry, io.BytesIO(packed))
        part.replace(self.path)


class Sitting:
    """A loaded backend, and what has been measured on it."""

    def __init__(self, backend: Any, model: Any, args: argparse.Namespace) -> None:
        from servesim.calibrate.probe.measure import Probe

        self.backend, self.model, self.args = backend, model, args
        asked = {**GRID, "rounds": 1, "precision": 0.0, "budget": 1e9}
        self.probe = Probe(backend, asked, lambda _: None)
        self.served: list[dict[str, Any]] = []  # steps of the calibration's replays
        self.hosts: list[Any] = []
        self.slices = 0

    def slice(self) -> None:
        """Calibrate a little more: a round of the designed steps, and a workload as a server sees it."""
        gc.collect()
        gc.disable()
        self.probe.run()
        gc.enable()
        if not self.args.no_in_situ:
            self._serve(CALIBRATED[self.slices % len(CALIBRATED)], self.slices)
        self.slices += 1

    def _serve(self, setting: str, part: int) -> None:
        from servesim.calibrate.probe.host_overhead import parts_of
        from servesim.engine.step import model_call

        rows = self.run(setting, "calibration", self.requests("calibration", part), 0)["told"]["calls"]
        calls = [model_call(row) for row in rows]
        self.hosts += parts_of(calls)
        for call in calls:
            point = IN_SITU + len(self.served)  # each is a point of its own
            seconds = call.end - call.called
            self.served.append({"kind": call.shape.kind, **call.shape._asdict(), "seconds": seconds, "point": point})

    def samples(self) -> str:
        """Return all samples so far, as the probe writes them."""
        from servesim.calibrate.probe.measure import COLUMNS

        self.probe.flag()
        file = io.StringIO()
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*self.probe.rows, *self.served])
        return file.getvalue()

    def run(self, setting: str, workload: str, requests: list[list[Any]], warm_up: int = WARM_UP) -> dict[str, Any]:
        """Replay one setting; return what was asked for and what was told."""
        from servesim.calibrate.live.driver import replay

        asked = engine(setting, workload)
        args = {
            "policy": SETTINGS[setting]["policy"],
            "engine": {**asked, "num_blocks": min(self.args.blocks, asked["num_blocks"])},
            "requests": requests,
            "seed": 0,
            "vocab": self.model.vocab,
            "context": self.model.context,
            "warm_up": warm_up,
        }
        return {"setting": setting, "workload": workload, "args": args, "told": replay(self.backend, args)}

    def requests(self, workload: str, part: int = 0) -> list[list[Any]]:
        """Return a workload's requests, so close together that the stock setting is offered the workload's load."""
        rows = drawn(workload, part)[: self.args.limit]
        prompt = sum(row[1] for row in rows) / len(rows)
        output = sum(row[2] for row in rows) / len(rows)
        batch = min(128, self.args.blocks * BLOCK // int(prompt + output))
        step = self._timed(1, int(prompt), 0) + output * self._timed(batch, 1, int(prompt + output / 2)) / batch
        scale = step / load_of(workload, part)  # seconds a request, at one request a second before
        return [
            [id, arrival * scale, prompt, output, output, 0, None, [], None, 0.0, None]
            for id, (arrival, prompt, output) in enumerate(rows)
        ]

    def _timed(self, rows: int, tokens: int, context: int) -> float:
        """Return the median seconds of a step."""
        from servesim.calibrate.device.backend import Row

        held, blocks = -(-(tokens + context) // BLOCK), self.args.blocks
        tables = [[1 + (row * held + place) % blocks for place in range(held)] for row in range(rows)]
        batch = [Row([7] * tokens, context, table) for table in tables]
        seconds = []
        for _ in range(9):
            start = time.perf_counter()
            self.backend.step(batch)
            self.backend.synchronize()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)[len(seconds) // 2]


def measure(args: argparse.Namespace) -> int:
    """Calibrate and replay every setting in turns, and record it all."""
    from servesim.calibrate.device.backend import MODELS
    from servesim.calibrate.device.torch.backend import TorchBackend

    begun = time.perf_counter()
    model = MODELS[args.model]
    backend = TorchBackend(args.device)
    backend.load(model, args.blocks + 1, BLOCK, HOST_BLOCKS)
    recorder = Recorder(Path(args.out))
    about = {**backend.describe(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    recorder.put("about.json", about)
    say(begun, f"loaded {args.model}")
    sitting = Sitting(backend, model, args)
    sitting.run("stock", "calibration", sitting.requests("calibration"))  # nothing of it is kept: the card warms up
    requests = {workload: sitting.requests(workload) for workload in args.workloads}
    todo = runs(args.workloads, args.settings)
    for place, (workload, setting, again) in enumerate(todo):
        while sitting.slices * len(todo) <= place * (args.slices - 1):
            sitting.slice()
        told = sitting.run(setting, workload, requests[workload])
        recorder.put(f"{'again/' if again else ''}{workload}/{setting}.json.gz", told)
        keep(recorder, sitting)
        say(begun, f"{workload} {setting}: {told['told']['end']:.1f} s, {len(told['told']['calls'])} calls")
    sitting.slice()
    keep(recorder, sitting)
    say(begun, f"{len(sitting.probe.rows)} designed samples, {len(sitting.served)} served, {sitting.slices} slices")
    return 0


def keep(recorder: Recorder, sitting: Sitting) -> None:
    """Write all there is, so that a sitting that breaks off is worth something."""
    recorder.put("samples.csv", sitting.samples())
    recorder.put("hosts.json", sitting.hosts)
    recorder.write()


def say(begun: float, what: str) -> None:
    """Tell how the sitting goes on."""
    print(f"{time.perf_counter() - begun:7.1f} s  {what}", flush=True)
