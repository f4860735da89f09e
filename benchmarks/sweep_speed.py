"""Speed of sweeps: python benchmarks/sweep_speed.py [--configs N ...] [--requests N] [--jobs N] [--json]

Prints for each number of configurations the wall-clock time per configuration of `sim sweep`, its peak memory with its
worker processes (Linux), the size of its folder and the time of `sim report`. CPU times are for a machine that runs
0.7 M bare SimPy timeouts per second. Smallest form: --configs 4 --requests 5 --jobs 1
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from timing import run_sim

SETTINGS = {
    "policy.max_num_seqs": [4, 8, 12, 16, 24, 32, 48, 64, 96, 128],
    "policy.max_num_batched_tokens": [128, 256, 384, 512, 768, 1024, 2048, 4096, 6144, 8192],
    "policy.long_prefill_token_threshold": [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024],
    "engine.num_blocks": [400, 500, 600, 700, 800, 1000, 1200, 1600, 3200, 6400],
}


def sweep_keys(configs: int, requests: int) -> dict[str, Any]:
    """Return a sweep of vllm-v1 with a number of configurations: a product of at most four numbers up to ten."""
    params, left = {}, configs
    for key, values in SETTINGS.items():
        params[key] = values[: min(len(values), left)]
        left = -(-left // len(values))
    lengths = {"kind": "lognormal", "prompt": {"mean": 300, "sd": 300}, "output": {"mean": 150, "sd": 100}}
    base = {
        "workload": {"requests": requests, "arrivals": {"kind": "poisson", "rate": 20}, "lengths": lengths},
        "policy": {"name": "vllm-v1"}, "profile": {"model": "llama-3.1-8b", "device": "H100"},
        "engine": {"num_blocks": 6400, "max_model_len": 4096},
    }  # fmt: skip
    return {"base": base, "params": params, "objectives": ["mean_e2el_ms", "mean_ttft_ms", "mean_tpot_ms"]}


def time_sweep(configs: int, requests: int, jobs: int) -> dict[str, Any]:
    """Run one sweep and its report again; return the figures of both."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "sweep.json"), Path(folder, "out")
        file.write_text(json.dumps(sweep_keys(configs, requests)), encoding="utf-8")
        sweep = run_sim(["sweep", str(file), "-o", str(out), "--jobs", str(jobs), "--quiet"])
        runs = sum(1 for _ in (out / "runs.jsonl").open(encoding="utf-8"))
        report = run_sim(["report", str(out)])
        return {
            "configurations": configs, "requests": requests, "jobs": jobs, "runs": runs,
            "wall_ms": 1e3 * sweep.wall / runs, "cpu_ms": 1e3 * sweep.timing.reference / runs,
            "peak_mb": sweep.memory / 1e6, "folder_mb": sum(path.stat().st_size for path in out.rglob("*")) / 1e6,
            "report_s": report.timing.reference, "report_wall_s": report.wall, "report_mb": report.memory / 1e6,
        }  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    """Return the figures of a sweep as text."""
    return (
        f"{row['configurations']} configurations of {row['requests']} requests, {row['jobs']} processes: per "
        f"configuration {row['wall_ms']:.1f} ms, {row['cpu_ms']:.1f} ms of CPU time at 0.7 M/s; peak memory "
        f"{row['peak_mb']:.0f} MB, folder {row['folder_mb']:.1f} MB; report {row['report_wall_s']:.1f} s, "
        f"{row['report_s']:.1f} s of CPU time at 0.7 M/s, {row['report_mb']:.0f} MB"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, nargs="+", default=[1_000, 10_000], metavar="N")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="of each run (default 200)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes (default 2)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per sweep")
    args = parser.parse_args()
    for configs in args.configs:
        row = time_sweep(configs, args.requests, args.jobs)
        print(json.dumps(row) if args.json else describe(row), flush=True)


if __name__ == "__main__":
    main()
