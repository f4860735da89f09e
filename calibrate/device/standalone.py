"""Probe a device on a host without servesim: copy sim, policies, calibrate and traces there and run this file.

    python calibrate/device/standalone.py --backend kbk --model llama2-7b --num-blocks 1024 -o DIR

It needs Python 3.9, numpy and the backend's framework. Copy DIR back and fit it with `sim calibrate fit DIR`.
Each sample is written at once. To resume after an interruption, run the same command again.
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

GRID = {"budget": 300.0, "precision": 0.01, "most_rows": 64, "most_tokens": 2048, "seed": 0}  # keys of probe.yaml


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure the step times of a device, without installing servesim.")
    parser.add_argument("--backend", choices=("kbk", "torch", "fake"), required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--weights")
    parser.add_argument("--option", action="append", default=[], type=parse_option, metavar="KEY=VALUE")
    # The second name of an option is that of 0.1.
    parser.add_argument("--num-blocks", "--blocks", dest="blocks", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--host-blocks", type=int, default=64)
    parser.add_argument("--max-seq-len", "--longest", dest="longest", type=int)
    parser.add_argument("-o", "--output", required=True)
    for name, default in GRID.items():
        option = "--" + name.replace("_", "-")
        names = dict.fromkeys((option.replace("most", "max"), option))
        parser.add_argument(*names, dest=name, type=type(default), default=default)
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


def probe_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the probe. A later session in the same folder must use the same."""
    names = ("backend", "model", "blocks", "block_size", "host_blocks", *GRID)
    settings = {name: getattr(args, name) for name in names}
    return settings if args.longest is None else {**settings, "longest": args.longest}


def earlier_samples(path: str) -> list[dict[str, str]]:
    """Return the samples of an earlier session. Exit if the file holds other rows."""
    if not os.path.exists(path):
        return []
    samples = importlib.import_module("servesim.calibrate.probe.samples")
    try:
        return [row.fields for row in samples.read_samples(Path(path), resume=True)]
    except samples.BadInput as error:
        sys.exit(str(error))


def main() -> int:
    """Probe; write every sample at once."""
    args = parse_arguments()
    worker = import_worker()
    probe = importlib.import_module("servesim.calibrate.probe.measure")
    backend = worker.open_backend({"backend": args.backend, "options": dict(args.option)})
    cache = {"blocks": args.blocks, "block_size": args.block_size, "host_blocks": args.host_blocks}
    about = worker.load(backend, {"model": args.model, "weights": args.weights, **cache}, lambda report: None)
    settings = probe_settings(args)
    os.makedirs(args.output, exist_ok=True)
    path = os.path.join(args.output, "samples.csv")
    with open(os.path.join(args.output, "probe.yaml"), "w", encoding="utf-8") as file:
        json.dump({"settings": settings, "about": about}, file, indent=1, default=str)  # JSON is YAML

    def append(report: dict[str, Any]) -> None:
        with open(path, "a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(report.pop("rows"))
        print("{known}/{points} points precise, at most {left:.0f} s left".format(**report), flush=True)

    rows = earlier_samples(path)
    open_text = importlib.import_module("servesim.files.write").open_text
    with open_text(path) as file:
        file.write(probe.as_csv(rows))  # drops a truncated last line
    result = probe.run(backend, {**settings, "resume": rows}, append)
    with open_text(path) as file:
        file.write(result["csv"])
    print(f"{path}: {result['known']} of {result['points']} points precise, {len(result['failed'])} failed")
    return 130 if result["interrupted"] else 0


if __name__ == "__main__":
    sys.exit(main())
