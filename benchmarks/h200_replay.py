"""Policy settings live on a GPU, and the simulation of them from a profile of the same sitting: the error, in a table.

On the machine with the GPU (torch, numpy and this repository, which need not be installed):
    python benchmarks/h200_replay.py --out DIR [--probe-seconds 90] [--workloads alpaca long] [--settings stock ...]
Anywhere with servesim installed, on the folder that came back:
    python benchmarks/h200_replay.py --compare DIR [--write TABLE.md]

DIR gets one archive: samples.csv (the probe), about.json (device and versions), and a file for every run with its
requests, decisions, calls and times. What is replayed is in replay_settings.py.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
import tarfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from replay_settings import BLOCK, BLOCKS, CALIBRATED, CALIBRATION, SETTINGS, WORKLOADS, drawn, engine  # noqa: E402

ARCHIVE = "h200_replay.tar.gz"
WARM_UP = 48  # requests
IN_SITU = 100_000  # the first point of steps that were not designed
HOST_BLOCKS = 256  # to swap to, in the probe


def find_package() -> None:
    """Make servesim importable from the checkout where it is not installed."""
    import importlib.util

    if importlib.util.find_spec("servesim"):
        return
    spec = importlib.util.spec_from_file_location("servesim_worker", ROOT / "calibrate" / "worker.py")
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    sys.meta_path.insert(0, worker.Beside(str(ROOT / "calibrate")))


# -- on the device -------------------------------------------------------------------------------------------------


class Recorder:
    """Collects the files of a sitting and packs them, whole after every run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / ARCHIVE
        self.files: dict[str, bytes] = {}

    def add(self, name: str, data: bytes) -> None:
        """Add a file and write the archive anew."""
        self.files[name] = data
        part = self.path.with_suffix(".part")
        with tarfile.open(part, "w:gz", compresslevel=1) as archive:
            for name, data in self.files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        part.replace(self.path)


def measure(args: argparse.Namespace) -> int:
    """Probe the device, replay every setting, and record it all."""
    find_package()
    from servesim.calibrate.backend import MODELS
    from servesim.calibrate.gpu import TorchBackend

    begun = time.perf_counter()
    model = MODELS[args.model]
    backend = TorchBackend(args.device)
    backend.load(model, args.blocks + 1, BLOCK, HOST_BLOCKS)
    say(begun, f"loaded {args.model}")
    recorder = Recorder(Path(args.out))
    about = {**backend.describe(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    recorder.add("about.json", json.dumps(about, default=str).encode())
    if args.probe_seconds > 0:
        samples = probe(backend, args)
        say(begun, "probed")
        samples += [] if args.no_in_situ else in_situ(backend, args, model)
        say(begun, f"{len(samples)} samples")
        recorder.add("samples.csv", as_csv(samples).encode())
    for workload in args.workloads:
        requests = stretched(workload, backend, args)
        for setting in args.settings:
            told = run(backend, setting, workload, requests, model, args.blocks)
            recorder.add(f"{workload}/{setting}.json.gz", gzip.compress(json.dumps(told).encode(), 1))
            say(begun, f"{workload} {setting}: {told['told']['end']:.1f} s, {len(told['told']['calls'])} calls")
    return 0


def say(begun: float, what: str) -> None:
    """Tell how the sitting goes on."""
    print(f"{time.perf_counter() - begun:7.1f} s  {what}", flush=True)


def probe(backend: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure steps over the grid that the workloads need, for so many seconds; return every sample."""
    from servesim.calibrate import probe as prober

    asked = {"budget": args.probe_seconds, "most_rows": 128, "most_tokens": 4096, "longest": 2048}
    result = prober.run(backend, asked, lambda _: None)
    print(f"           {result['known']} of {result['points']} points known in {result['seconds']:.0f} s", flush=True)
    return list(csv.DictReader(io.StringIO(result["csv"])))


def in_situ(backend: Any, args: argparse.Namespace, model: Any) -> list[dict[str, Any]]:
    """Replay a workload that is not judged; return its steps as samples: ragged batches, one kind after the other."""
    from servesim.core import Shape

    requests = stretched("calibration", backend, args)
    samples = []
    for setting in CALIBRATED:
        for _, called, end, *fields in run(backend, setting, "calibration", requests, model, args.blocks)["told"][
            "calls"
        ]:
            shape = Shape(*fields)
            kind = (
                "mixed" if shape.prefill_rows and shape.decode_rows else "prefill" if shape.prefill_rows else "decode"
            )
            point = IN_SITU + len(samples)  # each is a point of its own
            samples.append({"kind": kind, **shape._asdict(), "seconds": end - called, "point": point})
    return samples


def as_csv(samples: list[dict[str, Any]]) -> str:
    """Return samples as the probe writes them."""
    from servesim.calibrate.probe import COLUMNS

    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(samples)
    return file.getvalue()


def run(
    backend: Any, setting: str, workload: str, requests: list[list[Any]], model: Any, blocks: int
) -> dict[str, Any]:
    """Replay one setting; return what was asked for and what was told."""
    from servesim.calibrate.live import replay

    args = {
        "policy": SETTINGS[setting]["policy"],
        "engine": {**engine(setting, workload), "num_blocks": min(blocks, engine(setting, workload)["num_blocks"])},
        "requests": requests,
        "seed": 0,
        "vocab": model.vocab,
        "context": model.context,
        "warm_up": WARM_UP,
    }
    return {"setting": setting, "workload": workload, "args": args, "told": replay(backend, args)}


def stretched(workload: str, backend: Any, args: argparse.Namespace) -> list[list[Any]]:
    """Return a workload's requests, so close together that the stock setting is overloaded by the workload's load."""
    rows = drawn(workload)[: args.limit]
    prompt = sum(row[1] for row in rows) / len(rows)
    output = sum(row[2] for row in rows) / len(rows)
    batch = min(128, args.blocks * BLOCK // int(prompt + output))
    step = timed(backend, 1, int(prompt), 0) + output * timed(backend, batch, 1, int(prompt + output / 2)) / batch
    scale = step / WORKLOADS.get(workload, CALIBRATION)["load"]  # seconds a request, at one request a second before
    print(f"           {workload}: a request takes {1e3 * step:.1f} ms of the stock setting", flush=True)
    return [
        [id, arrival * scale, prompt, output, output, 0, None, [], None, 0.0, None]
        for id, (arrival, prompt, output) in enumerate(rows)
    ]


def timed(backend: Any, rows: int, tokens: int, context: int) -> float:
    """Return the median seconds of a step."""
    from servesim.calibrate.backend import Row

    held = -(-(tokens + context) // BLOCK)
    tables = [[1 + (row * held + place) % (backend.blocks - 1) for place in range(held)] for row in range(rows)]
    batch = [Row([7] * tokens, context, table) for table in tables]
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        backend.step(batch)
        backend.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def main() -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", metavar="DIR", help="measure, and write the archive there")
    parser.add_argument("--compare", metavar="DIR", help="compare what was measured")
    parser.add_argument("--write", metavar="FILE", help="with --compare: write the table there")
    parser.add_argument("--device", help="cuda, cuda:1, cpu (cuda where there is one)")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--probe-seconds", type=float, default=90.0, help="0: no probe")
    parser.add_argument("--no-in-situ", action="store_true", help="fit to the probe's designed steps alone")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests of each workload")
    args = parser.parse_args()
    if bool(args.out) == bool(args.compare):
        parser.error("one of --out and --compare is needed")
    if args.out:
        return measure(args)
    from replay_table import compare_all

    return compare_all(args)


if __name__ == "__main__":
    sys.exit(main())
