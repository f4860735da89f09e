"""Probe a device on a host without servesim: copy sim, policies, calibrate and traces there and run this file.

    python calibrate/device/standalone.py --backend kbk --model llama2-7b --num-blocks 1024 -o DIR

It needs Python 3.9, numpy and the backend's framework. Copy DIR back and fit it with `sim calibrate fit DIR`.
Each sample is written at once. To resume after an interruption, run the same command again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

GRID = {"budget": 300.0, "precision": 0.01, "max_rows": 64, "max_tokens": 2048, "seed": 0}  # keys of probe.yaml


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure the step times of a device, without installing servesim.")
    parser.add_argument("--backend", choices=("kbk", "torch", "fake"), required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--weights")
    parser.add_argument("--option", action="append", default=[], type=parse_option, metavar="KEY=VALUE")
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--host-blocks", type=int, default=64)
    parser.add_argument("--max-seq-len", type=int)
    parser.add_argument("-o", "--output", required=True)
    for name, default in GRID.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return parser.parse_args()


def parse_option(text: str) -> tuple[str, Any]:
    """Parse an option of the backend: numbers, true and false as JSON, other values as text."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, e.g. threads=1, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def import_worker() -> Any:
    """Make servesim importable from the folder of this file; return the worker module."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    importlib.import_module("worker").find_packages()
    return importlib.import_module("servesim.calibrate.device.worker")


def main() -> int:
    """Probe; an error of the input or of the disk is one line and exit code 2."""
    args = parse_arguments()
    worker = import_worker()
    try:
        return probe_device(args, worker)
    except importlib.import_module("servesim.core").BadInput as error:
        print(error, file=sys.stderr)
        return 2


def probe_device(args: argparse.Namespace, worker: Any) -> int:
    """Probe; write every sample at once."""
    probe = importlib.import_module("servesim.calibrate.probe.measure")
    samples = importlib.import_module("servesim.calibrate.probe.samples")
    read, write, table = (importlib.import_module(f"servesim.files.{name}") for name in ("read", "write", "step_table"))
    names = ("backend", "model", "num_blocks", "block_size", "host_blocks", *GRID)
    settings = {name: getattr(args, name) for name in names}
    settings.update({} if args.max_seq_len is None else {"max_seq_len": args.max_seq_len})
    path, described = Path(args.output, "samples.csv"), Path(args.output, "probe.yaml")
    earlier = read.read_json(described)["settings"] if described.exists() else settings
    for key in sorted({*settings, *earlier} - {"budget", "precision"}):  # with others, these are samples of other steps
        before, now = earlier.get(key), settings.get(key)
        if before != now:
            worker.bad_input(f"{path.parent}: was probed with {key} {before}, now {now}; use another folder")
    backend = worker.open_backend({"backend": args.backend, "options": dict(args.option)})
    cache = {"blocks": args.num_blocks, "block_size": args.block_size, "host_blocks": args.host_blocks}
    about = worker.load(backend, {"model": args.model, "weights": args.weights, **cache}, lambda report: None)
    write.write_json(described, {"settings": settings, "about": about})  # JSON is YAML

    def append(report: dict[str, Any]) -> None:
        table.append_steps(path, report.pop("rows"))
        print("{known}/{points} points precise, at most {left:.0f} s left".format(**report), flush=True)

    rows = [row.cells for row in samples.read_samples(path, resume=True)] if path.exists() else []
    table.write_steps(path, probe.COLUMNS, probe.as_rows(rows))  # drops a truncated last line
    result = probe.run(backend, {**settings, "resume": rows}, append)
    table.write_steps(path, probe.COLUMNS, result["rows"])
    about = about if result["power"] is None else {**about, "power": result["power"]}
    write.write_json(described, {"settings": settings, "about": about, "sampling": result["sampling"] or None})
    print(f"{path}: {result['known']} of {result['points']} points precise, {len(result['failed'])} failed")
    return 130 if result["interrupted"] else 0


if __name__ == "__main__":
    sys.exit(main())
