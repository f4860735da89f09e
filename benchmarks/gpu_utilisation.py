"""Utilisation of a GPU at several loads: MFU and MBU of our arithmetic next to the figures of nvidia-smi.

    python benchmarks/gpu_utilisation.py --out DIR [--seconds 15] [--policy vllm-v1] [--device cuda] [--model llama2-7b]

It needs torch, numpy and this repository (no installation). DIR gets utilisation.json (all figures) and one CSV file
with the samples of each run. Runs: prompts only, 20 % and 80 % of the estimated capacity, and all requests at once.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from h200_replay import find_package  # noqa: E402

find_package()
from servesim.calibrate.device.backend import MODELS, Row  # noqa: E402
from servesim.calibrate.device.torch.backend import TorchBackend  # noqa: E402
from servesim.calibrate.live.replay_job import replay  # noqa: E402
from servesim.costs.model_arithmetic import Peak, known_peak, stored_peak  # noqa: E402
from servesim.engine.work_totals import work_from_json  # noqa: E402
from servesim.runs.utilisation import TOKENS, summarise, utilisation, write_counters  # noqa: E402  # noqa: E402

BLOCK = 16  # tokens
WARM_UP = 16  # requests, at most
LOADS = {"prompts only": None, "20 % load": 0.2, "80 % load": 0.8, "all at once": 20.0}
HEAD = f"{'run':<14}{'seconds':>8}{'busy':>7}{'MFU':>7}{'MBU':>7} |{'GPU':>7}{'memory':>8}{'power':>8}{'J/1k tok':>10}"


class Session:
    """A loaded backend and the settings of the runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.model = args, MODELS[args.model]
        self.backend = TorchBackend(args.device)
        self.backend.load(self.model, args.blocks + 1, BLOCK, 0)
        self.about = self.backend.describe()
        peak = Peak(args.peak[0], args.peak[1], "--peak") if args.peak else known_peak(self.about)
        self.about["peak"] = stored_peak(peak)
        self.scale = min(1.0, self.model.context / 4096)  # of the lengths

    def time_step(self, rows: int, tokens: int, context: int) -> float:
        """Return the median seconds of a step."""
        per_row = -(-(tokens + context) // BLOCK)
        tables = [[1 + (row * per_row + i) % self.args.blocks for i in range(per_row)] for row in range(rows)]
        batch, seconds = [Row([7] * tokens, context, table) for table in tables], []
        for _ in range(9):
            start = time.perf_counter()
            self.backend.step(batch)
            self.backend.synchronize()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)[len(seconds) // 2]

    def requests(self, load: float | None) -> list[list[Any]]:
        """Return requests that keep the device busy for --seconds at this load; None: prompts without outputs."""
        rng = random.Random(7)
        prompt, output = int((1024 if load is None else 400) * self.scale), int(120 * self.scale)
        seconds = self.time_step(1, prompt, 0)
        if load is None:
            output, load = 1, 20.0
        else:
            seconds += output * self.time_step(self.args.batch, 1, prompt + output // 2) / self.args.batch
        count = max(3, int(self.args.seconds * min(load, 1.0) / seconds))
        rows: list[list[Any]] = []
        arrival = 0.0
        for number in range(count):
            lengths = [max(1, round(size * rng.uniform(0.5, 1.5))) if size > 1 else 1 for size in (prompt, output)]
            rows.append([number, arrival, *lengths, lengths[1], 0, None, [], None, 0.0, None])
            arrival += rng.expovariate(load / seconds)
        return rows

    def run(self, load: float | None) -> dict[str, Any]:
        """Run one load live; return its figures and samples."""
        result = replay(self.backend, {
            "policy": {"name": self.args.policy, "max_num_seqs": self.args.batch},
            "engine": {"num_blocks": self.args.blocks, "block_size": BLOCK, "max_model_len": self.model.context},
            "requests": self.requests(load), "seed": 0, "vocab": self.model.vocab, "context": self.model.context,
            "warm_up": min(WARM_UP, self.args.batch), "decisions": False,
        })  # fmt: skip
        tokens, end = sum(row[0] for row in result["requests"]), result["end"]
        device = summarise(result["counters"], end)
        joules = device["energy_j"]
        return {
            "seconds": end,
            "busy": sum(call[2] - call[0] for call in result["calls"]) / end,
            "output_tokens": tokens,
            **utilisation(work_from_json(result["work"]), self.about),
            "device": device,
            "remark": result["counters"]["remark"],
            "energy": None if joules is None else TOKENS * joules / tokens,
            "samples": result["counters"]["samples"],
        }


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def table_row(name: str, run: dict[str, Any]) -> str:
    """Return a line of the table; the figures right of the bar come from nvidia-smi."""
    mfu, mbu = (percent(None if run[key] is None else 100 * run[key]) for key in ("mfu", "mbu"))
    device = run["device"]
    gpu, memory = percent(device["utilisation_percent"]), percent(device["memory_busy_percent"])
    watts = "-" if device["power_w"] is None else f"{device['power_w']:.0f} W"
    energy = "-" if run["energy"] is None else f"{run['energy']:.0f}"
    busy = percent(100 * run["busy"])
    ours = f"{name:<14}{run['seconds']:>8.1f}{busy:>7}{mfu:>7}{mbu:>7} |"
    return f"{ours}{gpu:>7}{memory:>8}{watts:>8}{energy:>10}"


def main() -> int:
    """Run all loads and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=15.0, help="of device time per run (default 15)")
    parser.add_argument("--policy", default="vllm-v1")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    parser.add_argument("--model", default="llama2-7b", choices=list(MODELS))
    parser.add_argument("--blocks", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=128, help="most rows in a step (default 128)")
    parser.add_argument("--peak", nargs=2, type=float, metavar=("FLOPS", "BYTES"), help="per second, if not known")
    args = parser.parse_args()
    start, folder = time.perf_counter(), Path(args.out)
    session = Session(args)
    print(f"{session.about['device']}, {args.model}, {args.policy}; peak: {session.about['peak']}", flush=True)
    print(HEAD)
    runs = {}
    for name, load in LOADS.items():
        run = session.run(load)
        print(table_row(name, run), flush=True)
        for kind, row in run["utilisation"].items():
            fractions = "-" if row["mfu"] is None else f"MFU {100 * row['mfu']:.1f} %, MBU {100 * row['mbu']:.1f} %"
            print(f"    {kind}: {row['steps']} steps, {row['seconds']:.1f} s, {row['tokens']} tokens, {fractions}")
        if run["samples"]:
            write_counters(run.pop("samples"), folder / f"{name.replace(' ', '-').replace('%', 'percent')}.csv")
        if run["remark"]:
            print(run["remark"])
        runs[name] = run
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "utilisation.json").write_text(json.dumps({"about": session.about, "runs": runs}, indent=1, default=str))
    seconds = time.perf_counter() - start
    print(f"left of the bar: our arithmetic; right of it: nvidia-smi; {seconds:.0f} s in total")
    return 0


if __name__ == "__main__":
    sys.exit(main())
