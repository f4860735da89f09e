"""Run policy settings live on a GPU, simulate them from a profile of the same session, and write a table of the errors.

Measure on the machine with the GPU (torch, numpy and this repository, no installation):
    python benchmarks/h200_replay.py --out DIR [--slices 15] [--workloads alpaca long calm] [--settings stock ...]
Compare on any machine with servesim installed and a copy of DIR:
    python benchmarks/h200_replay.py --compare DIR [--write TABLE.md] [--profile OTHER]

DIR holds one archive: samples.csv and hosts.json (the calibration), about.json (device and versions), and one file per
run with its requests, decisions, model calls and times. replay_settings.py defines the settings and workloads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from replay_settings import BLOCKS, DEFAULT_WORKLOADS, SETTINGS, WORKLOADS  # noqa: E402


def find_package() -> None:
    """Make servesim importable from the checkout if it is not installed."""
    import importlib.util

    if importlib.util.find_spec("servesim"):
        return
    spec = importlib.util.spec_from_file_location("servesim_worker", ROOT / "calibrate" / "device" / "worker.py")
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    sys.meta_path.insert(0, worker.PackageFinder(str(ROOT / "calibrate" / "device")))


def main() -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", metavar="DIR", help="measure and write the archive to DIR")
    parser.add_argument("--compare", metavar="DIR", help="compare the runs in DIR with their simulation")
    parser.add_argument("--write", metavar="FILE", help="with --compare: write the table to FILE")
    parser.add_argument("--profile", metavar="NAME", help="with --compare: profile to use (default: this session's)")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--rows", type=int, default=128, help="most rows of a calibrated step (default 128; 512: many)")
    parser.add_argument("--slices", type=int, default=15, help="calibration slices in the session (default 15)")
    parser.add_argument("--no-in-situ", action="store_true", help="fit only the probe samples, without served steps")
    parser.add_argument("--workloads", nargs="+", default=DEFAULT_WORKLOADS, choices=list(WORKLOADS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N requests of each workload")
    args = parser.parse_args()
    if bool(args.out) == bool(args.compare):
        parser.error("give either --out or --compare")
    if args.slices < 2:
        parser.error(f"--slices: expected at least 2 (before and after the runs), got {args.slices}")
    find_package()
    if args.out:
        from replay_session import measure

        return measure(args)
    from replay_table import compare_all

    return compare_all(args)


if __name__ == "__main__":
    sys.exit(main())
