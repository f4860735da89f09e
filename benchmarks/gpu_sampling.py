"""Select tokens on the device or on the host, live on a GPU, and compare both with their simulation.

Measure on the machine with the GPU (torch, numpy and this repository, no installation; about four minutes):
    python benchmarks/gpu_sampling.py --out DIR [--seconds 240] [--workloads alpaca calm] [--repeats 3]
Compare on any machine with servesim installed and a copy of DIR:
    python benchmarks/gpu_sampling.py --compare DIR [--write TABLE.md]

Both variants are loaded at the same time and their runs alternate, so that a drift of the device affects both. The
profile is measured with sampling on the device (replay_session.py). The simulation of the other variant adds the
difference of the two measured times (`engine.sampling`). No step of a compared run is in the profile.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from h200_replay import find_package
from replay_settings import BLOCK, WORKLOADS

VARIANTS = ("device", "host")  # the profile is measured with the first one
SETTING = "stock"  # llm-serving with 128 decode slots
BLOCKS = 3200  # 26 GB of KV cache for a 7B model: two models fit into one device
SAMPLING = "sampling.json"
METRICS = {"makespan": "makespan", "mean_ttft_ms": "mean TTFT", "mean_tpot_ms": "mean TPOT"}


def main() -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", metavar="DIR", help="measure and write the archive to DIR")
    parser.add_argument("--compare", metavar="DIR", help="compare the runs in DIR with their simulation")
    parser.add_argument("--write", metavar="FILE", help="with --compare: write the tables to FILE")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--workloads", nargs="+", default=["alpaca", "calm"], choices=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3, help="runs per workload and variant (default 3)")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no further run after this time")
    parser.add_argument("--rows", type=int, default=128, help="largest batch of the sampling probe (default 128)")
    parser.add_argument("--points", type=int, metavar="N", help="use at most N points of the probe grid")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N requests of each workload")
    args = parser.parse_args()
    if bool(args.out) == bool(args.compare):
        parser.error("give either --out or --compare")
    find_package()
    return measure(args) if args.out else compare(args)


def measure(args: argparse.Namespace) -> int:
    """Run both variants live, with calibration slices between the runs, and record everything."""
    from replay_session import Recorder, print_progress

    start = time.perf_counter()
    sessions = {}
    for variant in VARIANTS:
        sessions[variant] = load(args, variant)
        print_progress(start, f"loaded {args.model} with sampling on the {variant}")
    probed = sessions[VARIANTS[0]]
    recorder = Recorder(Path(args.out))
    about = {**probed.backend.describe(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    recorder.put("about.json", about)
    medians: dict[str, list[list[float]]] = {}
    warm_up = probed.requests("calibration")
    for session in sessions.values():
        session.run(SETTING, "calibration", warm_up)  # warms up the device; the result is discarded
    requests = {workload: probed.requests(workload) for workload in args.workloads}
    for repeat in range(args.repeats):
        calibrate(probed, args, medians)
        save(recorder, probed, medians)
        print_progress(start, f"calibration {repeat + 1}")
        for workload in args.workloads:
            for variant in VARIANTS if repeat % 2 else VARIANTS[::-1]:
                if repeat and time.perf_counter() - start > args.seconds:
                    continue
                result = run(sessions[variant], variant, workload, requests[workload])
                recorder.put(f"runs/{workload}-{variant}-{repeat}.json.gz", result)
                print_progress(start, f"{workload} {variant}: {result['told']['end']:.2f} s")
        save(recorder, probed, medians)
        if time.perf_counter() - start > args.seconds:
            break
    calibrate(probed, args, medians)
    save(recorder, probed, medians)
    print_progress(start, f"{len(probed.probe.rows)} probe samples, {len(probed.served)} served steps")
    return 0


def load(args: argparse.Namespace, variant: str) -> Any:
    """Load the model with one variant; return its session."""
    from replay_session import HOST_BLOCKS, ReplaySession
    from servesim.calibrate.device.backend import MODELS
    from servesim.calibrate.device.torch.backend import TorchBackend

    model = MODELS[args.model]
    backend = TorchBackend(args.device, sampling=variant)
    backend.load(model, args.blocks + 1, BLOCK, HOST_BLOCKS if variant == VARIANTS[0] else 0)
    return ReplaySession(backend, model, argparse.Namespace(blocks=args.blocks, limit=args.limit, no_in_situ=False))


def calibrate(session: Any, args: argparse.Namespace, medians: dict[str, list[list[float]]]) -> None:
    """Measure one slice of the profile, and the times of the selection of tokens."""
    from servesim.calibrate.probe.token_selection import measure_sampling

    if args.points:
        session.probe.points = session.probe.points[:: -(-len(session.probe.points) // args.points)]
        session.probe.seconds = {index: session.probe.seconds[index] for index in range(len(session.probe.points))}
    session.calibrate_slice()
    gc.collect()
    gc.disable()
    for name, points in measure_sampling(session.backend, args.rows, budget=6.0).items():
        medians.setdefault(name, []).extend(points)
    gc.enable()


def run(session: Any, variant: str, workload: str, requests: Sequence[Any]) -> dict[str, Any]:
    """Run a workload live; the recorded engine names the variant."""
    result: dict[str, Any] = session.run(SETTING, workload, list(requests))
    result["args"]["engine"]["sampling"] = variant
    return result


def save(recorder: Any, session: Any, medians: dict[str, list[list[float]]]) -> None:
    """Write all results so far, so that an interrupted session can still be used."""
    from replay_session import save as save_session

    recorder.put(SAMPLING, medians)
    save_session(recorder, session)


def compare(args: argparse.Namespace) -> int:
    """Fit the profile, simulate every run with its variant, and print and write the tables."""
    from replay_table import compare_run, describe_steps, fit_profile, heading, read_archives, session_host
    from servesim.calibrate.probe.check import sampling_lines
    from servesim.calibrate.probe.token_selection import sampling_keys

    folder = Path(args.compare)
    files = read_archives(folder)
    about = json.loads(files["about.json"])
    about["sampling"] = sampling_keys(about["sampling"], json.loads(files[SAMPLING]))
    profile = fit_profile({**files, "about.json": json.dumps(about).encode()}, folder)
    recorded = [json.loads(gzip.decompress(files[name])) for name in sorted(files) if name.startswith("runs/")]
    host = session_host(files, recorded)
    comparisons: dict[tuple[str, str], list[Any]] = {}
    notes = []
    for entry in recorded:
        variant = entry["args"]["engine"]["sampling"]
        comparisons.setdefault((entry["workload"], variant), []).append(compare_run(entry, profile, host))
        steps = describe_steps(entry, profile.for_run(variant), host)
        notes.append(f"{variant:<8}{steps}")
    lines = [*heading(about, profile), *sampling_lines(profile), "", *error_table(comparisons), "", *gains(comparisons)]
    print("\n".join(lines))
    print("\nsection of profile.yaml:\nsampling: " + json.dumps(profile.about["sampling"]))
    print("\nstep seconds, measured / profile with this sampling, by kind of step; host overhead, measured and assumed")
    print("\n".join(notes))
    if args.write:
        Path(args.write).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def mean_of(comparisons: Sequence[Any], metric: str, side: str) -> float:
    """Return the mean of a metric over the repeats of a run: simulated or measured."""
    values = [getattr(comparison.row(metric), side) for comparison in comparisons]
    return sum(values) / len(values)


def error_table(comparisons: dict[tuple[str, str], list[Any]]) -> list[str]:
    """Return a Markdown table: measured values and the error of the simulation, the mean of all repeats."""
    head = ("workload", "sampling", "runs", *(f"{name}{cell}" for name in METRICS.values() for cell in ("", " error")))
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (workload, variant), runs in sorted(comparisons.items()):
        cells = [workload, variant, str(len(runs))]
        for metric in METRICS:
            measured, simulated = mean_of(runs, metric, "measured"), mean_of(runs, metric, "simulated")
            unit = "ms" if metric.endswith("_ms") else "s"
            cells += [f"{measured:.2f} {unit}", f"{100 * (simulated / measured - 1):+.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def gains(comparisons: dict[tuple[str, str], list[Any]]) -> list[str]:
    """Return a Markdown table: how much sampling on the device changes each metric, measured and simulated."""
    head = ("workload", "device against host", *METRICS.values())
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for workload in sorted({workload for workload, _ in comparisons}):
        pair = [comparisons.get((workload, variant), []) for variant in VARIANTS]
        for side in ("measured", "simulated") if all(pair) else ():
            changes = [mean_of(pair[0], m, side) / mean_of(pair[1], m, side) - 1 for m in METRICS]
            lines.append(f"| {workload} | {side} | {' | '.join(f'{100 * change:+.2f} %' for change in changes)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
