"""Probe a device on a host that has nothing of ours installed: copy these folders there and run this file.

    python calibrate/device/standalone.py --backend kbk --model llama2-7b --blocks 1024 -o DIR

It needs Python 3.9, numpy and the backend's framework. DIR, brought back, is what `sim calibrate fit DIR` takes.
Samples are written as they come; the same command goes on where an interrupted one stopped.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

GRID = {"budget": 300.0, "precision": 0.01, "most_rows": 64, "most_tokens": 2048, "seed": 0}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure a device's step times, servesim not installed.")
    parser.add_argument("--backend", choices=("kbk", "torch", "fake"), required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--weights")
    parser.add_argument("--option", action="append", default=[], type=option, metavar="KEY=VALUE")
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--host-blocks", type=int, default=64)
    parser.add_argument("--longest", type=int)
    parser.add_argument("-o", "--output", required=True)
    for name, default in GRID.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return parser.parse_args()


def option(text: str) -> tuple[str, Any]:
    """Read an option of the backend: a number or true and false as that, all else as text."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, e.g. threads=1, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def found_beside() -> Any:
    """Make the package found by the place of this file; return the worker's module."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    importlib.import_module("worker").find_packages()
    return importlib.import_module("servesim.calibrate.device.worker")


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the probe, which a later sitting must agree with."""
    names = ("backend", "model", "blocks", "block_size", "host_blocks", *GRID)
    settings = {name: getattr(args, name) for name in names}
    return settings if args.longest is None else {**settings, "longest": args.longest}


def before(path: str) -> list[dict[str, str]]:
    """Return the samples that are there; a file with other rows ends the program."""
    if not os.path.exists(path):
        return []
    samples = importlib.import_module("servesim.calibrate.probe.samples")
    try:
        return [row.fields for row in samples.read_samples(Path(path), resume=True)]
    except samples.BadInput as error:
        sys.exit(str(error))


def main() -> int:
    """Probe, keeping every sample at once."""
    args = arguments()
    worker = found_beside()
    probe = importlib.import_module("servesim.calibrate.probe.measure")
    backend = worker.opened({"backend": args.backend, "options": dict(args.option)})
    kept = {"blocks": args.blocks, "block_size": args.block_size, "host_blocks": args.host_blocks}
    about = worker.load(backend, {"model": args.model, "weights": args.weights, **kept}, lambda report: None)
    settings = settings_of(args)
    os.makedirs(args.output, exist_ok=True)
    path = os.path.join(args.output, "samples.csv")
    with open(os.path.join(args.output, "probe.yaml"), "w", encoding="utf-8") as file:
        json.dump({"settings": settings, "about": about}, file, indent=1, default=str)  # JSON is YAML

    def keep(report: dict[str, Any]) -> None:
        with open(path, "a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(report.pop("rows"))
        print("{known}/{points} points known, at most {left:.0f} s left".format(**report), flush=True)

    rows = before(path)
    open_text = importlib.import_module("servesim.files.write").open_text
    with open_text(path) as file:
        file.write(probe.as_csv(rows))  # without a last line that was cut off
    result = probe.run(backend, {**settings, "resume": rows}, keep)
    with open_text(path) as file:
        file.write(result["csv"])
    print(f"{path}: {result['known']} of {result['points']} points known, {len(result['failed'])} failed")
    return 130 if result["interrupted"] else 0


if __name__ == "__main__":
    sys.exit(main())
