"""Policy settings live on a GPU, and the simulation of them from a profile of the same sitting: the error, in a table.

On the machine with the GPU (torch, numpy and this repository, which need not be installed):
    python benchmarks/h200_replay.py --out DIR [--slices 15] [--workloads alpaca long calm] [--settings stock ...]
Anywhere with servesim installed, on the folder that came back:
    python benchmarks/h200_replay.py --compare DIR [--write TABLE.md] [--profile OTHER]

DIR gets one archive: samples.csv and hosts.json (the calibration), about.json (device and versions), and a file for
every run with its requests, decisions, calls and times. What is replayed is in replay_settings.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from replay_settings import BLOCKS, SETTINGS, WORKLOADS  # noqa: E402


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


def main() -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", metavar="DIR", help="measure, and write the archive there")
    parser.add_argument("--compare", metavar="DIR", help="compare what was measured")
    parser.add_argument("--write", metavar="FILE", help="with --compare: write the table there")
    parser.add_argument("--profile", metavar="NAME", help="with --compare: simulate from this one, not the sitting's")
    parser.add_argument("--device", help="cuda, cuda:1, cpu (cuda where there is one)")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--slices", type=int, default=15, help="of the calibration, spread over the sitting")
    parser.add_argument("--no-in-situ", action="store_true", help="fit to the probe's designed steps alone")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests of each workload")
    args = parser.parse_args()
    if bool(args.out) == bool(args.compare):
        parser.error("one of --out and --compare is needed")
    if args.slices < 2:
        parser.error("--slices: one before and one after at least, got " + str(args.slices))
    find_package()
    if args.out:
        from replay_sitting import measure

        return measure(args)
    from replay_table import compare_all

    return compare_all(args)


if __name__ == "__main__":
    sys.exit(main())
