"""`sim tune` on a GPU machine that has torch and numpy but no installation of servesim.

In three commands per round (plan and continue: with servesim installed; measure: on the machine with the GPU):
    python benchmarks/gpu_tune_loop.py plan -o DIR [--sweep FILE] [--decode-factor 0.8] [--profile h200-llama2-7b]
    python benchmarks/gpu_tune_loop.py measure DIR/plan.json -o RESULTS [--model llama2-7b] [--minutes 6]
    python benchmarks/gpu_tune_loop.py continue -o DIR --results RESULTS/results.json.gz
`continue` prints the table of the rounds, and writes the next plan.json unless the loop has ended.
In one command, if the machine also has pydantic, PyYAML and a copy of simpy (in the folder PACKAGES):
    python benchmarks/gpu_tune_loop.py run --packages PACKAGES -o DIR [--minutes 6]

A wrong start profile (--decode-factor 0.8: decodes 20 % too cheap) shows the correction.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from h200_replay import find_package  # noqa: E402

WARM_UP = 48  # requests
SWEEP: dict[str, Any] = {
    "name": "gpu",
    "base": {
        "workload": {
            "requests": 600,
            "arrivals": {"kind": "poisson", "rate": 40},
            "lengths": {
                "prompt": {"kind": "lognormal", "median": 200, "sigma": 0.7, "min": 16, "max": 1500},
                "output": {"kind": "lognormal", "median": 90, "sigma": 0.6, "min": 8, "max": 400},
            },
        },
        "engine": {"num_blocks": 6000, "block_size": 16, "max_model_len": 4096},
        "policy": {"name": "llm-serving", "decode_batch": 128, "prefill_batch": 1},
    },
    "params": [
        {"policy.decode_batch": [48, 128], "policy.prefill_batch": [1, 4]},
        {"policy": [{"name": "sarathi", "chunk_size": size, "max_num_seqs": 128} for size in (128, 256, 512)]},
        {
            "policy": [
                {"name": "vllm-chunked", "max_num_batched_tokens": size, "max_num_seqs": 128} for size in (256, 1024)
            ]
        },
    ],
    "objectives": ["mean_e2el_ms"],
}


def main() -> int:
    """Run one action."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["plan", "measure", "continue", "run"])
    parser.add_argument("plan", nargs="?", help="measure: plan.json")
    parser.add_argument("-o", "--output", required=True, metavar="DIR")
    parser.add_argument("--sweep", metavar="FILE", help="sweep file (default: one for an H200)")
    parser.add_argument("--profile", default="h200-llama2-7b", help="start profile (default h200-llama2-7b)")
    parser.add_argument("--decode-factor", type=float, default=1.0, help="multiply the decodes of the start profile")
    parser.add_argument("--results", metavar="FILE", help="continue: results.json.gz of measure")
    parser.add_argument("--packages", metavar="DIR", help="run: folder with a copy of simpy")
    parser.add_argument("--backend", default="torch", help="backend (default torch)")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    parser.add_argument("--minutes", type=float, default=6.0, help="maximum device time (default 6)")
    parser.add_argument("-j", "--jobs", type=int, help="worker processes of sweeps (default: one per core)")
    parser.add_argument("--top", type=int, default=3, help="leaders, and measurements per round (default 3)")
    args = parser.parse_args()
    if args.packages:
        sys.path.insert(0, args.packages)
    find_package()
    return {"plan": plan_round, "continue": plan_round, "measure": measure, "run": run_all}[args.action](args)


def sweep_file(args: argparse.Namespace) -> Path:
    """Return the sweep file of a folder; the first call writes it, with the start profile next to it."""
    from servesim.calibrate.tune.step_times import scaled_parts
    from servesim.config.layers import merge, read_mapping
    from servesim.costs.device_profile import load_profile, write_profile
    from servesim.costs.parts import PartsCost
    from servesim.files.write import write_yaml

    folder = Path(args.output)
    file = folder / "sweep.yaml"
    if not file.exists():
        profile = load_profile(args.profile)
        assert isinstance(profile.cost, PartsCost), f"{args.profile}: expected a cost model of kind parts"
        about = {key: value for key, value in profile.about.items() if key != "uncertainty"}
        write_profile(folder / "start-profile", about, scaled_parts(profile.cost, 1.0, args.decode_factor))
        tree = read_mapping(Path(args.sweep), "sweep") if args.sweep else SWEEP
        write_yaml(file, merge(tree, {"base": {"profile": str(folder / "start-profile")}}))
    return file


class MeasureFirst(Exception):
    """The next measurement must be made on the other machine."""


class StoredResults:
    """Results of the action `measure`, in place of a device."""

    has_steps = host_separate = ready = True

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.results = results

    def measure(self, name: str, scenario: Any, file: Path, profile: Any, max_seconds: float) -> Any:
        """Return a stored result."""
        from servesim.calibrate.replay.measured_run import run_from_result
        from servesim.calibrate.replay.replay import as_backend_scenario, replay_requests

        stored = self.results.get(file.stem)
        if stored is None:
            raise MeasureFirst
        requests = replay_requests(scenario)
        return run_from_result(as_backend_scenario(scenario), profile, requests, stored["result"]), stored["seconds"]


def plan_round(args: argparse.Namespace) -> int:
    """Sweep and choose until a measurement is missing; write the plan, or print the result."""
    from servesim.calibrate.tune.loop import Tuner
    from servesim.calibrate.tune.results import format_rounds, write_results
    from servesim.calibrate.tune.setup import Settings, tuned_experiment
    from servesim.study.executor import open_executor
    from servesim.study.sweep_file import read_experiment

    folder = Path(args.output)
    results = json.loads(gzip.decompress(Path(args.results).read_bytes())) if args.results else {}
    experiment = tuned_experiment(read_experiment(sweep_file(args)), on_backend=True)
    settings = Settings(60 * args.minutes, top=args.top)
    with open_executor("local", args.jobs) as executor:
        tuner = Tuner(experiment, StoredResults(results), folder / "tuned", executor, settings, print)
        try:
            result = tuner.run({}, resume=True)
        except MeasureFirst:
            names = write_plan(tuner, folder / "plan.json")
            print(f"measure next: {', '.join(names)}; plan: {folder / 'plan.json'}")
            if tuner.rounds:
                print(format_rounds(tuner.rounds))
            return 0
    write_results(result, folder / "tuned")
    print(format_rounds(result.rounds))
    print(f"stopped: {result.reason}; device time {result.device_seconds / 60:.2f} minutes")
    return 0


def write_plan(tuner: Any, path: Path) -> list[str]:
    """Write the arguments of the live runs that the last choice needs."""
    from servesim.calibrate.device.backend import MODELS
    from servesim.calibrate.live.setup import replay_arguments
    from servesim.calibrate.replay.replay import as_backend_scenario, replay_requests
    from servesim.files.write import write_json

    model = MODELS[str(tuner.start_profile.about.get("model", "llama2-7b"))]
    number, runs = len(tuner.rounds), {}
    for config, name in tuner.missing(number):
        scenario = tuner.scenario(config)
        runs[f"round{number}-{name}"] = replay_arguments(
            as_backend_scenario(scenario), replay_requests(scenario), model, WARM_UP
        )
    write_json(path, runs)
    return list(runs)


def measure(args: argparse.Namespace) -> int:
    """Run the plan on the device. Every finished run is written at once."""
    from servesim.calibrate.device.backend import MODELS
    from servesim.calibrate.live.replay_job import replay

    plan = json.loads(Path(args.plan).read_text(encoding="utf-8"))
    path = Path(args.output) / "results.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    start = last = time.perf_counter()
    backend = make_backend(args)
    engines = [run["engine"] for run in plan.values()]
    blocks, host = (max(engine[key] for engine in engines) for key in ("num_blocks", "host_blocks"))
    backend.load(MODELS[args.model], blocks + 1, engines[0]["block_size"], host)
    results = {}
    for name, run in plan.items():
        result = replay(backend, run)
        now = time.perf_counter()
        results[name] = {"result": result, "seconds": now - last}
        path.write_bytes(gzip.compress(json.dumps(results).encode(), 1))
        print(f"{now - start:7.1f} s  {name}: {result['end']:.1f} s, {len(result['calls'])} model calls", flush=True)
        last = now
        if now - start > 60 * args.minutes:
            break
    return 0


def make_backend(args: argparse.Namespace) -> Any:
    """Return the backend of the action `measure`; the fake one tries the loop without a GPU."""
    if args.backend == "fake":
        from servesim.calibrate.device.fake import FakeBackend

        return FakeBackend({"prefill_token": 1e-5, "decode_step": 0.006, "decode_row": 4e-5})
    from servesim.calibrate.device.torch.backend import TorchBackend

    return TorchBackend(args.device)


def run_all(args: argparse.Namespace) -> int:
    """Run the whole loop on this machine."""
    from servesim.cli import main as sim

    folder = Path(args.output)
    options = [f"--option=device={args.device}"] if args.device else []
    limits = ["--device-minutes", str(args.minutes), "--top", str(args.top), "--warm-up", str(WARM_UP)]
    target = ["--backend", args.backend, *([] if args.backend == "fake" else ["--model", args.model])]
    return sim(["tune", str(sweep_file(args)), "-o", str(folder / "tuned"), "--resume", *target, *limits, *options])


if __name__ == "__main__":
    sys.exit(main())
